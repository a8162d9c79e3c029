"""Steps that are enqueued ahead, before earlier draws are known, give the same output as steps that are not."""

from typing import ClassVar

import pytest
import torch

from kvrail.engine.engine import MAX_FAILURES
from kvrail.engine.request.events import Admitted, Failed, Finished, Prefilled
from kvrail.engine.step import in_flight
from tests.engine.bench import Bench, Transfer
from tests.engine.page_machine import VOCAB, PageMachine, expected

LIMITS = {"num_pages": 200, "max_batch_tokens": 24, "mixed_batch_tokens": 12}


def test_decode_steps_are_enqueued_before_tokens_are_known():
    bench = Bench(ahead=True, **LIMITS)
    bench.submit("r", [1, 2, 3], max_tokens=20)
    bench.run()
    assert bench.tokens("r") == expected([1, 2, 3], 20)
    assert bench.machine.fed == bench.machine.drew == 19  # all but the first, which the prompt gives
    assert bench.machine.steps == [[3]] + [[1]] * 19  # what ends by its length has no step too many
    assert bench.events["r"][-1] == Finished(20)


def test_drafting_sequences_delay_no_other():
    prompt, other = [4] * 9, [1, 2, 3]
    bench = Bench(ahead=True, max_drafts=10, **LIMITS)
    bench.submit("drafts", prompt, max_tokens=30, remote=True)
    bench.submit("other", other, max_tokens=41)
    transfer = Transfer(bench, "drafts", prompt)
    transfer.first()
    transfer.coarse(wrong=False)
    bench.run()
    assert bench.machine.steps == [[1, 3]] + [[1, 1]] * 9 + [[1]] * 31
    assert bench.machine.fed == 40 + 9  # all but the first token and the first draft
    assert bench.tokens("other") == expected(other, 41)
    transfer.exact()
    bench.run()
    assert bench.tokens("drafts") == expected(prompt, 30)


def test_an_unforeseen_end_costs_one_row_and_changes_nothing():
    prompt, other = [1, 2, 3], [9, 8]
    tokens = expected(prompt, 20)
    stop = next(token for i, token in enumerate(tokens) if i > 4 and token not in tokens[:i])
    bench = Bench(ahead=True, **LIMITS)
    bench.submit("stops", prompt, max_tokens=20, stop_token_ids=(stop,))
    bench.submit("other", other, max_tokens=20)
    bench.run()
    assert bench.tokens("stops") == tokens[: tokens.index(stop) + 1]
    assert bench.tokens("other") == expected(other, 20)
    assert sum(len(step) for step in bench.machine.steps) == 20 + tokens.index(stop) + 1 + 1


def test_chunks_are_enqueued_ahead_too():
    bench = Bench(ahead=True, **LIMITS)
    bench.submit("first", [1] * 5, max_tokens=40)
    bench.step(1)
    bench.submit("long", list(range(50)), max_tokens=4)
    bench.run()
    assert bench.tokens("long") == expected(range(50), 4)
    assert [1, 11] in bench.machine.steps  # a chunk beside a decode, whose token came from the device
    assert bench.machine.fed == 39 + 3


def test_first_tokens_of_several_are_waited_for():
    bench = Bench(ahead=True, **LIMITS)
    bench.submit("three", list(range(21)), n=3, max_tokens=6)
    bench.run()
    for index in range(3):
        assert bench.tokens("three", index) == expected(range(21), 6, index)


def test_pages_are_kept_while_an_enqueued_step_writes_them():
    bench = Bench(ahead=True, **{**LIMITS, "prefix_cache": False})
    bench.submit("r", [1, 2, 3], max_tokens=20)
    bench.step(2)  # and the third is enqueued
    bench.engine.abort("r")
    assert bench.engine.status().pages.used == 2
    bench.engine.step()
    assert bench.engine.status().pages.used == 0
    bench.engine.check()


@pytest.mark.parametrize("where", ["enqueue", "land"])
def test_a_failing_step_fails_its_own_requests(where, monkeypatch):
    bench = Bench(ahead=True, **LIMITS)
    bench.submit("r", [1, 2, 3], max_tokens=20)
    bench.submit("s", [4], max_tokens=20)
    bench.step(3)
    broken, name = (bench.machine, "execute") if where == "enqueue" else (bench.engine._sampler, "begin")
    whole = getattr(broken, name)

    def fail(*args):
        if where == "enqueue":
            raise RuntimeError("broken")
        drawn = whole(*args)
        drawn.asked = True  # waiting fails
        return drawn

    monkeypatch.setattr(broken, name, fail)
    bench.step(2)
    monkeypatch.undo()
    assert bench.of("r", Failed) and bench.of("s", Failed)
    bench.submit("next", [5, 6], max_tokens=6)
    bench.run()
    assert bench.tokens("next") == expected([5, 6], 6)
    bench.engine.check()


def test_steps_that_fail_only_when_enqueued_ahead_end_the_engine(monkeypatch):
    bench = Bench(ahead=True, **LIMITS)
    execute = bench.machine.execute

    def failing(slices, on_layer=None, feed=None, draws=()):
        if feed is not None:
            raise RuntimeError("the device is broken")
        return execute(slices, on_layer, feed, draws)

    monkeypatch.setattr(bench.machine, "execute", failing)
    for number in range(MAX_FAILURES):
        assert bench.engine.status().healthy
        bench.submit(f"r{number}", [1, 2, 3], max_tokens=20)
        bench.run()
        assert isinstance(bench.events[f"r{number}"][-1], Failed)
    assert not bench.engine.status().healthy


class LateMachine(PageMachine):
    """Computes steps that draw nothing when somebody waits for them, as a GPU that is slower than the host."""

    late: ClassVar[list] = []

    def execute(self, slices, on_layer=None, feed=None, draws=()):
        if any(piece.num_logits for piece in slices):
            self.compute()
            return super().execute(slices, on_layer, feed, draws)
        self.late.append(lambda: super(LateMachine, self).execute(slices, on_layer, feed, draws))
        return torch.empty(0, VOCAB)

    @classmethod
    def compute(cls):
        while cls.late:
            cls.late.pop(0)()


class Waiting:
    def __init__(self, device):
        self._behind = list(LateMachine.late)

    def wait(self):
        while LateMachine.late and LateMachine.late[0] in self._behind:
            LateMachine.late.pop(0)()


def test_pages_count_as_computed_once_the_device_has_computed_them(monkeypatch):
    """Or a transfer, which works beside the steps, would send pages that it finds cached before they are written."""
    monkeypatch.setattr(in_flight, "Enqueued", Waiting)
    monkeypatch.setattr(LateMachine, "late", [])
    bench, first = Bench(ahead=True, machine=LateMachine, **LIMITS), list(range(90))
    other = [*first[:30], *range(50, 60)]
    bench.submit("first", first, prefill_only=True)
    bench.step(1)
    bench.submit("other", other, prefill_only=True)
    (admitted,) = bench.of("other", Admitted)
    assert 0 < admitted.cached_tokens < len(first)
    lease = bench.engine.claim_lease("other")
    assert bench.machine.read(lease.pages, admitted.cached_tokens) == other[: admitted.cached_tokens]
    bench.run()
    assert [bench.of(name, Prefilled)[0].tokens[0].token_id for name in ("first", "other")] == [
        expected(prompt, 1)[0] for prompt in (first, other)
    ]
