"""Steps that are enqueued before the draws of the step before are known give the output of steps that are not."""

import random

import pytest

from kvrail.engine.events import Admitted, Failed, Finished, Prefilled
from tests.engine.bench import Bench, Transfer, prompts
from tests.engine.page_machine import VOCAB, expected

LIMITS = {"num_pages": 200, "max_batch_tokens": 24, "mixed_batch_tokens": 12}


def test_decode_steps_are_enqueued_before_tokens_are_known():
    bench = Bench(ahead=True, **LIMITS)
    bench.submit("r", [1, 2, 3], max_tokens=20)
    bench.run()
    assert bench.tokens("r") == expected([1, 2, 3], 20)
    assert bench.machine.fed == 19  # all but the first, which the prompt gives
    assert bench.machine.steps == [[3]] + [[1]] * 19  # what ends by its length has no step too many
    assert bench.events["r"][-1] == Finished(20)


def test_an_end_that_nobody_foresaw_costs_one_row_and_changes_nothing():
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


def test_chunks_follow_one_another_ahead():
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


@pytest.mark.parametrize("where", ["enqueue", "land"])
def test_a_step_that_fails_takes_its_own_requests_along(where, monkeypatch):
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


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num_pages", [16, 60])
def test_traffic_of_all_kinds(seed, num_pages):
    """Aborts, stops, preemptions, several sequences, prefills for others and transfers, at any moment."""
    rng = random.Random(seed)
    bench = Bench(num_pages=num_pages, ahead=True, max_batch_tokens=24, mixed_batch_tokens=rng.choice([0, 8]))
    asked, waiting = {}, {}
    for number, prompt in enumerate(prompts(60, longest=30, seed=seed)):
        name = str(number)
        kind = rng.choice(["plain", "plain", "stops", "several", "prefill", "remote"])
        options = {"max_tokens": rng.randint(1, 12)}
        if kind == "stops":
            options["stop_token_ids"] = tuple(rng.sample(range(VOCAB), 12))
        if kind == "several":
            options["n"] = 2
        options |= {"prefill_only": True} if kind == "prefill" else {"remote": True} if kind == "remote" else {}
        bench.submit(name, prompt, **options)
        asked[name] = (prompt, kind)
        if kind == "remote":
            waiting[name] = prompt
        for _ in range(rng.randint(0, 5)):
            bench.step(1)
            arrived = [each for each in waiting if bench.of(each, Admitted)]
            if arrived and rng.random() < 0.5:
                finish_transfer(bench, rng, arrived[0], waiting.pop(arrived[0]))
        if rng.random() < 0.2:
            aborted = rng.choice(list(asked))
            waiting.pop(aborted, None)
            bench.engine.abort(aborted)
    for _ in range(200):
        bench.run()
        for name in asked:
            if bench.of(name, Prefilled):
                bench.engine.abort(name)  # nobody claims its lease
        for name in [each for each in waiting if bench.of(each, Admitted)]:
            finish_transfer(bench, rng, name, waiting.pop(name))
    assert not waiting
    assert bench.engine.status().pages.used == 0
    assert bench.machine.fed > 50
    for name, (prompt, _) in asked.items():
        assert not bench.of(name, Failed)
        for index in range(2):
            tokens = bench.tokens(name, index)
            assert tokens == expected(prompt, len(tokens), index)


def finish_transfer(bench, rng, name, prompt):
    transfer = Transfer(bench, name, prompt)
    transfer.first()
    if rng.random() < 0.4:
        transfer.coarse(wrong=rng.random() < 0.5)
        bench.step(rng.randint(0, 3))
    if rng.random() < 0.2:
        transfer.lose()
    else:
        transfer.exact()
