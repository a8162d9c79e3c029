"""The prompts that a step computes: short ones do not wait for a long one, and the long one still advances."""

import pytest

from kvrail.engine.request.events import Output
from kvrail.engine.request.sequence import Sequence
from kvrail.engine.schedule import chunks, scheduler
from kvrail.values.sampling import SamplingParams
from tests.engine.bench import Bench
from tests.engine.page_machine import expected

BUDGET = 16


def prompt(length: int, first: int = 1) -> list[int]:
    return [(first + 7 * i) % 50 for i in range(length)]


def first_tokens(bench: Bench, names: str) -> dict[str, int]:
    """The number of steps after which each had its first token."""
    found, steps = {}, 0
    while len(found) < len(names):
        bench.step(1)
        steps += 1
        assert steps < 200
        found |= {name: steps for name in names if name not in found and bench.of(name, Output)}
    return found


@pytest.mark.parametrize("ahead", [False, True])
def test_short_prompts_do_not_wait_for_a_long_one(ahead):
    bench = Bench(num_pages=64, max_batch_tokens=BUDGET, ahead=ahead)
    bench.submit("l", prompt(100), max_tokens=2)
    for number, name in enumerate("abc"):
        bench.submit(name, prompt(7, number + 2), max_tokens=1)
    took = first_tokens(bench, "labc")
    # Half of the budget is theirs: one after another, or nearly so.
    assert sorted(took[name] for name in "abc") <= [2, 3, 4]
    assert took["l"] <= 100 // BUDGET + 5
    bench.run()
    for name, length, first in (("l", 100, 1), ("a", 7, 2), ("b", 7, 3), ("c", 7, 4)):
        assert bench.tokens(name) == expected(prompt(length, first), 2 if name == "l" else 1)


def test_a_long_prompt_gets_half_of_each_step_beside_any_number_of_short_ones():
    bench = Bench(num_pages=64, max_batch_tokens=BUDGET, max_running=64, max_waiting=1000)
    bench.submit("l", prompt(96), max_tokens=1)
    steps = 0
    while not bench.of("l", Output):
        bench.submit(f"s{steps}", prompt(9, steps), max_tokens=1)
        bench.submit(f"t{steps}", prompt(10, steps), max_tokens=1)
        bench.step(1)
        steps += 1
        assert steps <= 2 * 96 // BUDGET + 2


def test_equal_prompts_end_in_the_order_of_arrival():
    took = {}
    for names in ("a", "abc"):
        bench = Bench(num_pages=64, max_batch_tokens=BUDGET)
        for number, name in enumerate(names):
            bench.submit(name, prompt(2 * BUDGET, number), max_tokens=1)
        took[names] = first_tokens(bench, names)
    assert took["abc"]["a"] < took["abc"]["b"] < took["abc"]["c"]
    assert took["abc"]["a"] == took["a"]["a"]  # the prompt that came first and lacks the fewest tokens loses nothing


def test_the_whole_budget_of_a_step_is_used():
    bench = Bench(num_pages=64, max_batch_tokens=BUDGET)
    for number, name in enumerate("abcd"):
        bench.submit(name, prompt((40, 3, 30, 5)[number], number), max_tokens=1)
    bench.engine.step()
    work = bench.scheduler.schedule()
    assert sum(item.count for item in work) == BUDGET


def test_a_step_takes_up_no_prompt_beside_one_that_ends_once_it_has_enough(monkeypatch):
    share, counted = chunks.share, []

    def counting(*given):
        counted.append(counts := share(*given))
        return counts

    monkeypatch.setattr(chunks, "ENOUGH_TOKENS", 8)
    monkeypatch.setattr(scheduler, "share", counting)
    for lengths, wanted in (
        ((8, 8), [[8], [8]]),
        ((12, 12), [[12], [12]]),
        ((3, 3, 3, 3), [[3, 3, 3], [3]]),
        ((40, 3, 3), [[8, 3], [8, 3], [16], [8]]),  # the oldest has half of a step, whatever ends
    ):
        counted.clear()
        bench = Bench(num_pages=64, max_batch_tokens=BUDGET)
        for number, length in enumerate(lengths):
            bench.submit(str(number), prompt(length, number), max_tokens=1)
        bench.run()
        steps = [[count for count in counts if count] for counts in counted]
        assert [step for step in steps if step] == wanted, lengths


def test_where_many_tokens_wait_a_step_takes_a_part_of_them(monkeypatch):
    """Prompts of 8 tokens: with 64 waiting a step takes four of them, with 16 or fewer one."""
    monkeypatch.setattr(chunks, "ENOUGH_TOKENS", 8)
    prompts = [(Sequence("r", n, SamplingParams(max_tokens=1), prompt(8, n), arrival=n), 0) for n in range(64)]
    for waiting, taken in ((64, 4), (47, 3), (32, 2), (16, 1), (2, 1)):
        counts = chunks.share(prompts[:waiting], [8] * waiting, tokens=256, rows=256)
        assert [count for count in counts if count] == [8] * taken, waiting


def test_a_request_of_many_sequences_leaves_places_for_others():
    """They leave one of eight places; those that wait for it are no reason to refuse other requests."""
    bench = Bench(num_pages=64, max_batch_tokens=64, max_running=8, max_waiting=2)
    bench.submit("many", [1, 2, 3], max_tokens=20, n=32)
    bench.step(4)
    status = bench.engine.status()
    assert (status.running, status.waiting) == (7, 25)
    bench.submit("one", [4, 5, 6], max_tokens=2)
    bench.step(2)
    assert bench.of("one", Output)
    bench.run()
    assert bench.tokens("one") == expected([4, 5, 6], 2)
