import pytest

from kvrail.runtime.breaker import FAILURES, FIRST_PAUSE_S, LONGEST_PAUSE_S, Breaker


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        self.now += 1e-6
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def broken(clock):
    breaker = Breaker(clock)
    for _ in range(FAILURES):
        assert breaker.allows
        breaker.failed(breaker.begin())
    return breaker


def test_failures_in_a_row_open_it_and_the_pause_ends_with_one_trial(broken, clock):
    assert not broken.allows
    assert 0 < broken.pause_s <= FIRST_PAUSE_S
    clock.now += FIRST_PAUSE_S
    assert broken.allows
    began = broken.begin()
    assert not broken.allows  # one trial at a time
    broken.succeeded(began)
    assert broken.allows
    assert broken.closed


def test_each_trial_that_fails_doubles_the_pause_up_to_a_bound(broken, clock):
    pauses = []
    for _ in range(10):
        pauses.append(round(broken.pause_s, 3))
        clock.now += broken.pause_s
        broken.failed(broken.begin())
    assert pauses[:5] == [1, 2, 4, 8, 16]
    assert pauses[5:] == [LONGEST_PAUSE_S] * 5


def test_a_trial_that_nobody_waits_for_lets_the_next_one_go(broken, clock):
    clock.now += FIRST_PAUSE_S
    broken.left(broken.begin())
    assert broken.allows
    assert not broken.closed


def test_what_is_lost_together_counts_once(clock):
    breaker = Breaker(clock)
    under_way = [breaker.begin() for _ in range(50)]
    for began in under_way:
        breaker.failed(began)
    assert breaker.failures == 1
    assert breaker.closed


def test_an_answer_to_what_began_before_a_failure_proves_nothing(clock):
    breaker = Breaker(clock)
    early = breaker.begin()
    for _ in range(FAILURES):
        breaker.failed(breaker.begin())
    breaker.succeeded(early)
    assert not breaker.closed


def test_a_success_between_failures_starts_the_count_anew(clock):
    breaker = Breaker(clock)
    for _ in range(5):
        for _ in range(FAILURES - 1):
            breaker.failed(breaker.begin())
        breaker.succeeded(breaker.begin())
    assert breaker.closed
