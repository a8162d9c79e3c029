"""How fast prompts come: how the mean begins and follows, and what pauses count."""

import math

import pytest

from kvrail.services.router.fleet.demand import IDLE_S, PAUSE_S, RECENT_S, SECONDS, DemandClock, TokenRate


class Fleet:
    """Two workers' rates, and the time in one's hands."""

    def __init__(self) -> None:
        self.now = 100.0
        self.clock = DemandClock(lambda: self.now)
        self.a, self.b = TokenRate(self.clock), TokenRate(self.clock)

    def load(self, seconds: float, *rates: TokenRate) -> None:
        """1,000 tokens a second for each of them."""
        for _ in range(round(10 * seconds)):
            for rate in rates:
                rate.add(100)
            self.now += 0.1


def test_a_rate_is_right_from_the_beginning():
    fleet = Fleet()
    assert fleet.a.read() == 0
    for _ in range(2):  # and again after a pause
        fleet.load(2, fleet.a)
        assert fleet.a.read() == pytest.approx(1000, rel=0.1)
        fleet.now += 9 * SECONDS


def test_a_rate_follows_the_load():
    fleet = Fleet()
    fleet.load(40, fleet.a)
    assert fleet.a.read() == pytest.approx(1000, rel=0.03)
    fleet.now += 5 * SECONDS
    assert fleet.a.read() < 10


@pytest.mark.parametrize("pause", [0.2, 1.0, IDLE_S - 0.2])
def test_a_pause_without_requests_says_little(pause):
    fleet = Fleet()
    fleet.clock.begin()
    fleet.load(20, fleet.a)
    fleet.clock.end()
    before = fleet.a.read()
    fleet.now += pause
    assert fleet.a.read() == pytest.approx(before * math.exp(-min(pause, PAUSE_S) / SECONDS), rel=0.01)
    fleet.load(1, fleet.a)
    assert fleet.a.read() == pytest.approx(1000, rel=0.1)


@pytest.mark.parametrize(("left", "counts"), [(9, True), (6, True), (5, False), (1, False)])
def test_time_counts_while_most_requests_are_left(left, counts):
    """Ten decode for SECONDS: either all end together, and more come at once, or they end and none comes."""
    fleet = Fleet()
    for _ in range(10):
        fleet.clock.begin()
    fleet.load(20, fleet.a)
    for _ in range(10 - left):
        fleet.clock.end()
    fleet.now += SECONDS
    expected = SECONDS if counts else PAUSE_S
    assert fleet.a.read() == pytest.approx(1000 * math.exp(-expected / SECONDS), rel=0.05)
    fleet.clock.begin()  # few, but a load
    before = fleet.a.read()
    fleet.now += SECONDS
    assert fleet.a.read() == pytest.approx(before * math.exp(-1), rel=0.05)


def test_the_recent_rate_goes_first():
    fleet = Fleet()
    fleet.load(20, fleet.a)
    fleet.load(2 * RECENT_S, fleet.a, fleet.a)
    assert fleet.a.read() < 1400 and fleet.a.read(RECENT_S) == pytest.approx(1800, rel=0.05)


def test_prompts_that_other_routers_gave_count():
    fleet = Fleet()
    fleet.load(20, fleet.a, fleet.b)
    fleet.load(2 * SECONDS, fleet.b)
    assert fleet.a.read() == pytest.approx(1000 * math.exp(-2), rel=0.05)
    assert fleet.b.read() == pytest.approx(1000, rel=0.05)


def test_time_never_goes_back():
    fleet, seen = Fleet(), []
    clock = fleet.clock
    for step in (0.1, PAUSE_S, 1.0, 5.0, 0.0, IDLE_S, 2 * IDLE_S, 0.3):
        for change in (clock.begin, clock.begin, clock.prompt, clock.end, clock.end):
            change()
            for _ in range(4):
                seen.append(clock.now())
                fleet.now += step / 4
    assert seen == sorted(seen)
