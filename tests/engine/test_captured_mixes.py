"""Requests of every kind of sampling, together over captured steps: each gets the answer that it gets alone.

Alone they run on an engine without captured steps, whose steps are not enqueued ahead and which shares no pages.
"""

import asyncio
import functools
import random
from dataclasses import dataclass, field, replace

import pytest
import torch
from prometheus_client import CollectorRegistry

from kvrail.engine.batch.batch import SequenceSlice
from kvrail.engine.batch.packing import pack
from kvrail.engine.engine import Engine
from kvrail.engine.kv.pages import PagePool
from kvrail.engine.request.events import Admitted, Failed, Finished, Output, Prefilled, PromptScored
from kvrail.engine.request.requests import EngineRequest, ModelLimits, Resumed
from kvrail.engine.sampling.draw import DrawParams, draw_words
from kvrail.engine.sampling.sampler import Sampler
from kvrail.engine.schedule.chunks import StepBudget
from kvrail.engine.schedule.scheduler import Scheduler
from kvrail.engine.step.buffers import StepBuffer, decode_size, mixed_size
from kvrail.engine.step.runner import ModelRunner
from kvrail.grammar import Grammars, texts
from kvrail.telemetry.worker import EngineMetrics
from kvrail.values.sampling import SamplingParams
from tests.engine.captured_machine import MAX_LEN, QUERIES, CapturedRunner, TokenModel, without_cuda
from tests.engine.drafting import loaded
from tests.models import VOCAB

PAGE = 4
EOS = frozenset({256})
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
GRAMMARS = (texts.whole(texts.from_schema(SCHEMA, lenient=False)), texts.whole(texts.from_lark("start: /[a-f]{2,9}/")))


@functools.cache
def grammar(text: str):
    tokenizer = loaded("llama")[1]
    return asyncio.run(Grammars(lambda: tokenizer, EOS).get(text, "test")) if text else None


@dataclass
class Answer:
    """The output of one sequence of a request."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list = field(default_factory=list)
    end: tuple = ()


class Site:
    """An engine stepped by hand, and its events."""

    def __init__(self, runner: ModelRunner, **limits: int) -> None:
        self.runner, self.events = runner, {}
        self.pool = PagePool(runner.cache.num_pages, PAGE, prefix_cache=limits.pop("prefix_cache", True))
        self.scheduler = Scheduler(self.pool, StepBudget(**{"max_waiting": 99, "prompt_rows": 16, **limits}))
        self.engine = Engine(
            runner,
            Sampler(VOCAB, torch.device("cpu")),
            self.scheduler,
            ModelLimits(VOCAB, MAX_LEN, EOS),
            loaded("llama")[1],
            EngineMetrics(CollectorRegistry(), "tokens"),
            self.deliver,
            max_drafts=8,
        )

    def deliver(self, events) -> None:
        for name, event in events:
            self.events.setdefault(name, []).append(event)

    def step(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()
            self.engine.check()

    def run(self) -> None:
        for _ in range(3000):
            if not self.engine.pending():
                return
            self.step(1)
        pytest.fail("the engine does not come to an end")

    def of(self, name: str, kind: type) -> list:
        return [event for event in self.events.get(name, []) if isinstance(event, kind)]

    def answers(self, name: str, n: int) -> list[Answer]:
        answers = [Answer() for _ in range(n)]
        for output in self.of(name, Output):
            answer = answers[output.index]
            answer.tokens += output.token_ids
            answer.text += output.text
            answer.logprobs += output.logprobs
            answer.end = (output.finish_reason, output.stop_reason)
        return answers

    def scores(self, name: str) -> list[float]:
        return [value for event in self.of(name, PromptScored) for value in event.logprobs.logprobs]


def captured_site(num_pages: int, **limits: int) -> Site:
    size = {"max_running": 8, "max_batch_tokens": 40}
    return Site(CapturedRunner(num_pages, PAGE, **size), **size, **limits)


@functools.cache
def plain_site() -> Site:
    size = {"max_running": 4, "max_batch_tokens": 200}
    return Site(ModelRunner(TokenModel(PAGE), 100, invariant=False, **size), prefix_cache=False, **size)


def alone(asked: EngineRequest) -> tuple[list[Answer], list[float]]:
    site = plain_site()
    site.events.clear()
    site.engine.submit(replace(asked, request_id="alone", remote=False, resumed=()))
    site.run()
    assert site.of("alone", Finished)
    return site.answers("alone", asked.params.n), site.scores("alone")


def any_params(rng: random.Random) -> SamplingParams:
    """Every kind of sampling, mostly several at once."""
    n = rng.choice([1, 1, 1, 2, 3])
    params = SamplingParams(max_tokens=rng.randint(1, 14), temperature=0.0, n=n, seed=rng.randrange(1 << 40))
    if rng.random() < 0.7:
        changes = {"top_p": 0.8, "top_k": 5, "min_p": 0.05}
        kept = {name: value for name, value in changes.items() if rng.random() < 0.3}
        params = replace(params, temperature=rng.choice([0.3, 1.0, 2.0]), **kept)
    if rng.random() < 0.3:
        params = replace(params, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=-0.2)
    if rng.random() < 0.2:
        params = replace(params, logit_bias={rng.randrange(VOCAB): 4.0, rng.randrange(VOCAB): -9.0})
    if rng.random() < 0.3:
        params = replace(params, logprobs=rng.choice([0, 3]))
    if rng.random() < 0.25:
        params = replace(params, prompt_logprobs=rng.choice([0, 2]))
    if rng.random() < 0.3:
        params = replace(params, stop_token_ids=tuple(rng.sample(range(VOCAB), 20)), min_tokens=rng.randint(0, 3))
    if rng.random() < 0.2:
        params = replace(params, stop=("a", "er"))
    if rng.random() < 0.2:
        params = replace(params, grammar=rng.choice(GRAMMARS), min_tokens=0)
    return replace(params, min_tokens=min(params.min_tokens, params.max_tokens))


class Traffic:
    """Requests that come, draft, move and leave at any moment, over a decode engine and one that computes prompts."""

    def __init__(self, seed: int, num_pages: int) -> None:
        self.rng = random.Random(seed)
        self.decode, self.prefill = captured_site(num_pages), captured_site(120)
        self.asked: dict[str, EngineRequest] = {}
        self.kept: dict[str, int] = {}  # tokens that another engine had emitted before
        self.left: set[str] = set()
        self.moving: list[str] = []

    def ask(self) -> None:
        rng, name = self.rng, str(len(self.asked))
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 2, 3, rng.randint(4, 60)]))]
        if self.asked and rng.random() < 0.3:
            known = rng.choice(list(self.asked.values())).prompt_ids
            prompt = [*known[: rng.randint(1, len(known))], *prompt][:60]
        params = any_params(rng)
        asked = EngineRequest(name, tuple(prompt), params, grammar=grammar(params.grammar))
        if params.prompt_logprobs is None and rng.random() < 0.4:
            asked = replace(asked, remote=True)
            self.moving.append(name)
            self.prefill.engine.submit(replace(asked, remote=False, prefill_only=True))
        elif params.n == 1 and params.logprobs is None and rng.random() < 0.2:
            (answer,), _ = alone(asked)
            self.kept[name] = rng.randint(0, len(answer.tokens) - 1)
            asked = replace(asked, resumed=(Resumed(tuple(answer.tokens[: self.kept[name]])),))
        self.asked[name] = asked
        self.decode.engine.submit(asked)

    def move_some(self) -> None:
        """Transfers whose two ends are ready make progress, or fail."""
        for name in list(self.moving):
            admitted, prefilled = self.decode.of(name, Admitted), self.prefill.of(name, Prefilled)
            if admitted and prefilled and self.rng.random() < 0.6:
                self.moving.remove(name)
                self.prefill.engine.abort(name)
                if admitted[0].awaits_kv:
                    self._move(name, admitted[0].cached_tokens, prefilled[0].tokens)

    def _move(self, name: str, held: int, first: tuple) -> None:
        engine, rng = self.decode.engine, self.rng
        lease = engine.claim_lease(name)
        if lease is None:
            return
        with engine.change() as requests:
            requests.receive_first_tokens(name, first)
        if rng.random() < 0.5:
            self._write(lease.pages, name, held, shift=rng.choice([0, 0, 1]))
            with engine.change() as requests:
                requests.receive_coarse_kv(name)
            self.decode.step(rng.randint(0, 5))
        if rng.random() < 0.2:
            with engine.change() as requests:
                requests.compute_here(name)
        else:
            self._write(lease.pages, name, held)
            with engine.change() as requests:
                requests.receive_kv(name)
        engine.release_lease(lease)

    def _write(self, pages: tuple[int, ...], name: str, held: int, shift: int = 0) -> None:
        cells = self.decode.runner.cache.tensors["keys"][0].view(-1)
        for place, token in enumerate(self.asked[name].prompt_ids[held:], start=held):
            cells[pages[place // PAGE] * PAGE + place % PAGE] = (token + shift) % VOCAB

    def leave(self) -> None:
        name = self.rng.choice(list(self.asked))
        self.left.add(name)
        self.moving = [each for each in self.moving if each != name]
        for site in (self.decode, self.prefill):
            site.engine.abort(name)

    def run(self, count: int) -> None:
        for _ in range(count):
            self.ask()
            for site in (self.prefill, self.decode):
                site.step(self.rng.randint(0, 2))
            self.move_some()
            if self.rng.random() < 0.1:
                self.leave()
        for _ in range(300):
            self.prefill.run()
            self.decode.run()
            self.move_some()

    def check(self) -> None:
        assert not self.moving
        for name, asked in self.asked.items():
            assert not self.decode.of(name, Failed) and not self.prefill.of(name, Failed)
            assert name in self.left or self.decode.of(name, Finished)
            answers, scores = alone(asked)
            whole = name not in self.left
            for found, wanted in zip(self.decode.answers(name, asked.params.n), answers, strict=True):
                rest = wanted.tokens[self.kept.get(name, 0) :]
                assert found.tokens == (rest if whole else rest[: len(found.tokens)]), asked
                if whole and name not in self.kept:
                    assert (found.text, found.end) == (wanted.text, wanted.end), asked
                assert_same_logprobs(found.logprobs, wanted.logprobs)
            found_scores = self.decode.scores(name)
            torch.testing.assert_close(found_scores, scores if whole else scores[: len(found_scores)])


def assert_same_logprobs(found: list, wanted: list) -> None:
    for one, other in zip(found, wanted, strict=False):
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
        torch.testing.assert_close([one.logprob, *dict(one.top).values()], [other.logprob, *dict(other.top).values()])


@pytest.mark.parametrize(("seed", "num_pages"), [(0, 26), pytest.param(1, 26, marks=pytest.mark.heavy), (2, 120)])
def test_each_request_gets_the_answer_that_it_gets_alone(seed, num_pages, monkeypatch):
    without_cuda(monkeypatch)
    traffic = Traffic(seed, num_pages)
    traffic.run(60)
    assert traffic.decode.engine.status().pages.used == traffic.prefill.engine.status().pages.used == 0
    assert traffic.decode.scheduler.preemptions > 0 or num_pages > 26
    traffic.check()


def test_a_prompt_whose_rows_and_draws_are_of_equal_count_gets_its_own_draws(monkeypatch):
    """Two rows of logits, scored and drawn from; two draws, both from the second row."""
    without_cuda(monkeypatch)
    asked = EngineRequest("r", (50, 300), SamplingParams(max_tokens=1, temperature=0.0, n=2, prompt_logprobs=0))
    site = captured_site(40)
    site.engine.submit(asked)
    site.run()
    first, second = site.answers("r", 2)
    (wanted,), _ = alone(replace(asked, params=replace(asked.params, n=1)))
    assert first.tokens == second.tokens == wanted.tokens


@pytest.mark.parametrize("draws", range(9))
@pytest.mark.parametrize("random_rows", [False, True])
def test_every_size_takes_steps_with_any_draws(draws, random_rows):
    """Alternates with greedy steps, so that anything that a random step leaves behind shows."""
    kinds = [DrawParams(0.0, 0, 1.0, -float("inf"), (0, 0)), DrawParams(0.7, 3, 0.9, -2.0, (1, 2))]
    params = [kinds[random_rows and row % 2] for row in range(draws)]
    decodes = [SequenceSlice([row], row, [0, 1, 2], 1) for row in range(max(1, draws))]
    for size in (decode_size(9, 3, 1), decode_size(9, 3, 1, 32), mixed_size(32, 9, 3, 1, 32, QUERIES)):
        buffer = StepBuffer(size, torch.device("cpu"))
        for now in (params, [], params, [kinds[0]] * draws):
            buffer.fill(pack(decodes, PAGE), draws=now)
            buffer.send()
            words = buffer.there.draws
            assert len(words) == size.draws
            if size.draws and any(each.temperature for each in now):
                assert torch.equal(words[: len(now)], torch.from_numpy(draw_words(now)))
            else:
                assert not words[:, 2].any()  # greedy
            assert not words[len(now) :].any()
