"""If KV is about to arrive, the next step is planned late; if that cannot pay, early."""

import pytest

from kvrail.engine.schedule.launch_delay import LEFT, LaunchDelay
from tests.engine.bench import Bench, Transfer
from tests.engine.page_machine import expected


class NearEnd:
    """An event that happens when it is waited for, and what happens with it."""

    def __init__(self, then=lambda: None):
        self.waited, self.then = 0, then

    def synchronize(self):
        self.waited += 1
        self.then()


def waits(delay):
    event = NearEnd()
    delay.wait(event, lambda: None)
    return bool(event.waited)


def test_a_launch_that_takes_longer_than_is_left_is_not_delayed():
    delay = LaunchDelay()
    delay.launched(0.002)
    assert not waits(delay)  # no step has been timed yet
    delay.landed(0.002 / LEFT + 1e-6)
    assert waits(delay)
    delay.launched(0.003)
    assert not waits(delay)


def test_one_slow_launch_is_forgotten_and_one_slow_step_is_not_believed():
    delay = LaunchDelay()
    delay.landed(0.01)
    delay.launched(1.0)
    delay.landed(5.0)  # held up by that launch
    assert not waits(delay)
    count = 0
    while not waits(delay):
        delay.launched(0.001)
        delay.landed(0.01)
        count += 1
        assert count < 50
    delay.launched(0.02)
    delay.landed(0.1)
    assert not waits(delay)


def test_without_an_event_nothing_is_waited_for():
    delay = LaunchDelay()
    delay.landed(1.0)
    delay.wait(None, pytest.fail)


@pytest.mark.parametrize("slow", [False, True])
def test_a_sequence_whose_kv_comes_while_a_step_computes_is_in_the_next_one(slow):
    bench = Bench(num_pages=64, ahead=True)
    bench.submit("decodes", [1, 2, 3], max_tokens=60)
    bench.submit("comes", [4] * 9, max_tokens=5, remote=True)
    bench.step(6)
    if slow:
        bench.engine._launch_delay.launched(10.0)
    transfer = Transfer(bench, "comes", [4] * 9)
    event = bench.machine.near_end = NearEnd()
    bench.step(1)
    assert not event.waited  # the prompt is still being computed: no KV is about to arrive
    transfer.first()
    event.then = transfer.exact
    if not slow:
        bench.engine._launch_delay.landed(10.0)  # the shorter of two counts
        bench.engine._launch_delay._step_s = 10.0
    before = len(bench.machine.steps)
    bench.step(1)
    if slow:
        assert not event.waited
        transfer.exact()
        bench.step(1)
    assert bench.machine.steps[before:] == ([[1], [1, 1]] if slow else [[1, 1]])
    event.then = lambda: None
    bench.run()
    assert bench.tokens("comes") == expected([4] * 9, 5)
    assert bench.tokens("decodes") == expected([1, 2, 3], 60)
    assert event.waited == (not slow)


def test_drafts_whose_exact_kv_comes_while_a_step_computes_are_verified_in_the_next_one():
    bench = Bench(num_pages=64, ahead=True, max_batch_tokens=100)
    bench.submit("drafts", [4] * 9, max_tokens=30, remote=True)
    transfer = Transfer(bench, "drafts", [4] * 9)
    transfer.first()
    transfer.coarse(wrong=False)
    event = bench.machine.near_end = NearEnd()
    bench.step(5)
    assert bench.machine.steps == [[1]] * 6
    event.then = transfer.exact
    bench.engine._launch_delay.landed(10.0)
    bench.engine._launch_delay._step_s = 10.0
    bench.step(2)
    assert bench.machine.steps[6:] == [[1 + 6]]
    bench.run()
    assert bench.tokens("drafts") == expected([4] * 9, 30)
