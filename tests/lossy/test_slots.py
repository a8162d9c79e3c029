"""Requests of all kinds over pages that lose bits: each says what it says alone, and no slot is lost."""

import random

import pytest

from kvrail.engine.request.events import Failed, Finished, Verified
from tests.engine.bench import prompts
from tests.engine.page_machine import VOCAB
from tests.engine.test_speculation_traffic import AT_ONCE, Traffic
from tests.lossy.machine import LossyBench, LossyTransfer, spoken


def prompt_of(length, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_requests_of_all_kinds_over_scarce_slots(seed: int, ahead: bool) -> None:
    bench = LossyBench(90, 45, seed, ahead=ahead, max_running=AT_ONCE, max_batch_tokens=48)
    traffic = Traffic(bench, seed, LossyTransfer)
    (shared,) = prompts(1, 20)
    for prompt in prompts(130, longest=40, seed=seed):
        traffic.ask([*shared[: traffic.rng.randint(0, 20)], *prompt])
        traffic.run(at_most=AT_ONCE - 1)
        if traffic.rng.random() < 0.1:
            traffic.cancel_one()
    traffic.run(at_most=0)
    bench.run()
    assert bench.engine.status().pages.used == 0
    ended = [name for name in traffic.prompts if bench.of(name, Finished)]
    assert len(ended) > 30 and not any(bench.of(name, Failed) for name in traffic.prompts)
    for name, prompt in traffic.prompts.items():
        tokens = bench.tokens(name)
        assert tokens == spoken(prompt, len(tokens))
        assert name not in ended or len(tokens) == traffic.lengths[name]
    assert bench.cells.closings > 100 and bench.cells.refusals and bench.scheduler.preemptions > 0
    verdicts = [event for name in traffic.prompts for event in bench.of(name, Verified)]
    assert any(v.proposed for v in verdicts)  # drafts read all pages open, so that few are right
