"""Workers of both roles under a load that changes: as good as the best fixed split of each phase, and steady."""

from statistics import pstdev

import pytest

from benchmarks.simulator.layouts import LAYOUTS, SPEEDS, Layout, row_of
from benchmarks.simulator.roles import (
    DECODE_HEAVY,
    PREFILL_HEAVY,
    RolesSimulation,
    goodput,
    keeps,
    phases,
    settled_s,
    turns,
)
from benchmarks.simulator.workers import Job
from kvrail.services.router.fleet.ways import Slo

# With four workers these prompts need three for nearly all of their time, and draws decide how many compute them.
WORKERS, SECONDS, SETTLED = 8, 20.0, 10.0
STEPS = (PREFILL_HEAVY, DECODE_HEAVY, PREFILL_HEAVY)


@pytest.fixture(scope="module")
def stepped():
    simulation = RolesSimulation(WORKERS)
    return simulation, simulation.run(phases(STEPS, WORKERS, SECONDS)).jobs


def best_split(step):
    """Goodput of the best one. None is better than one that serves all within the limits."""
    trace, best = phases([step], WORKERS, SECONDS), 0.0
    for prefill in range(1, WORKERS):
        if best < 1.0:
            best = max(best, goodput(RolesSimulation(WORKERS, prefill).run(trace).jobs, SETTLED, SECONDS))
    return best


def test_each_phase_is_served_as_by_its_best_split(stepped):
    _, jobs = stepped
    best = {step.name: best_split(step) for step in STEPS[:2]}
    for number, step in enumerate(STEPS):
        found = goodput(jobs, number * SECONDS + SETTLED, (number + 1) * SECONDS)
        assert found >= 0.95 * best[step.name], (step, found, best)
        begin, end = number * SECONDS, (number + 1) * SECONDS
        assert settled_s(jobs, begin, end, 0.95 * best[step.name]) <= SETTLED


def test_the_ways_do_not_alternate(stepped):
    simulation, _ = stepped
    for number in range(len(STEPS)):
        shares = turns(simulation.ways, number * SECONDS + SETTLED, (number + 1) * SECONDS)
        assert len(shares) >= 10 and pstdev(shares) < 0.1


def test_what_keeps_the_limits():
    job = Job(0, 1.0, 100, 11, [], first_token=1.4, end=1.6)
    assert keeps(job, Slo()) and not keeps(job, Slo(0.3)) and not keeps(job, Slo(0.5, 0.01))
    assert (goodput([job], 0.0, 2.0), goodput([job], 0.0, 2.0, Slo(0.3))) == (1.0, 0.0)


def test_closed_streams_are_served_as_by_the_better_layout():
    """Also where a load is so steady that all steps have one size, and say nothing of a sequence's cost."""
    rows, served = [(streams, 1024, 128) for streams in (8, 16, 32)], {}
    for name in LAYOUTS:
        layout = Layout(name, SPEEDS["h200"])
        served[name] = [layout.figures(jobs) for jobs in layout.closed(rows, 10)]
    for pair, whole, both in zip(*served.values(), strict=True):
        assert both[0] > 0.95 * max(pair[0], whole[0])
        assert both[1] < 1.15 * pair[1] and both[3] > 0.75


@pytest.mark.parametrize(("row", "measured"), [("32", 29.7), ("64", 42.1), ("128", 50.9), ("8x8000", 4.6)])
def test_two_whole_workers_serve_what_was_measured(row, measured):
    """On two H200s: benchmarks/results/roles-2026-11-29-2xh200.md."""
    layout = Layout("two whole", SPEEDS["h200"])
    assert layout.figures(layout.closed([row_of(row)], 10)[0])[0] == pytest.approx(measured, rel=0.08)


def test_a_worker_has_the_next_long_prompt_before_it_ends_one():
    """Else each is followed by two steps that compute none."""
    layout = Layout("two whole", SPEEDS["h200"])
    layout.closed([(64, 4000, 64)], 8)
    assert layout.figures(layout.jobs)[0] > 13.7


def test_single_requests_before_a_crowd_do_not_slow_it_down():
    """All that workers had measured is what one sequence takes."""
    crowd = (32, 1024, 128)
    for name in ("two whole", "both roles"):
        fresh, used = Layout(name, SPEEDS["h200"]), Layout(name, SPEEDS["h200"])
        alone = fresh.figures(fresh.closed([crowd], 8)[0])
        after = used.figures(used.closed([(1, 1024, 128), crowd], 8)[1])
        assert after[0] > 0.9 * alone[0] and after[1] < 200
