"""Drafts on coarse KV of real (tiny) models: the answers are those without drafts, and transformers' own."""

import functools
import random
from dataclasses import replace

import pytest
import torch

from kvrail.engine.request.events import Output, Verified
from kvrail.engine.step.runner import ModelRunner
from kvrail.values.sampling import FinishReason, SamplingParams
from tests.engine.drafting import PAGE_SIZE, Coarse, DecodeSite, Transfer, deliver, exact, noise, prefill, rounded
from tests.models import generate, tiny_model

LENGTH = 75
TOLERANCE = 1e-4
"""Tolerance of log probabilities and KV: steps of other shapes sum float32 in other orders."""
LONG = {"max_tokens": LENGTH, "ignore_eos": True}
SAMPLED = {**LONG, "temperature": 0.8, "seed": 11}
CASES = {
    "greedy": {**LONG, "temperature": 0.0},
    "sampled": SAMPLED,
    "filtered": {**SAMPLED, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
    "penalties": {**SAMPLED, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    "greedy penalties": {**LONG, "temperature": 0.0, "repetition_penalty": 1.5},
    "logit bias": {**SAMPLED, "temperature": 1.5, "logit_bias": {i: 4.0 for i in range(97, 123)} | {33: -100.0}},
    "logprobs": {**SAMPLED, "logprobs": 3},
    "min tokens": {"max_tokens": LENGTH, "temperature": 3.0, "seed": 2, "min_tokens": 40, "stop_token_ids": range(60)},
    "max tokens": {**SAMPLED, "max_tokens": 37},
}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


PROMPT = prompt_of(85)


def params_of(case: dict) -> SamplingParams:
    return SamplingParams(**{**case, "stop_token_ids": tuple(case.get("stop_token_ids", ()))})


def with_drafts(cases: dict[str, dict], form: Coarse, family: str = "llama", **options: bool) -> DecodeSite:
    """All cases at once: drafts on one form of KV, then the exact one."""
    site = DecodeSite(family, num_pages=160)
    deliver(site, [site.begin(name, PROMPT, params_of(case), **options) for name, case in cases.items()], form)
    assert site.engine.status().pages.used == 0
    return site


def without_drafts(cases: dict[str, dict]) -> DecodeSite:
    site = DecodeSite(num_pages=160, max_drafts=0)
    for name, case in cases.items():
        transfer = site.begin(name, PROMPT, params_of(case))
        transfer.send_coarse(noise)
        transfer.send_exact()
    site.run()
    return site


@functools.cache
def plain() -> DecodeSite:
    """The cases of CASES without drafts."""
    return without_drafts(CASES)


def assert_same(site: DecodeSite, other: DecodeSite, name: str) -> None:
    assert site.answer(name) == other.answer(name)
    ours, theirs = site.logprobs(name), other.logprobs(name)
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=TOLERANCE)
        assert dict(a.top) == pytest.approx(dict(b.top), abs=TOLERANCE)


@pytest.mark.parametrize("form", [exact, rounded, noise])
def test_answers_are_those_without_drafts(form: Coarse) -> None:
    site = with_drafts(CASES, form)
    for name in CASES:
        assert_same(site, plain(), name)
        count = site.answer(name)[-1]
        assert count > 30, f"the answer of {name} is too short to say anything"
        if form is exact:
            assert site.accepted(name) == min(64, count - 1)
        if form is noise:
            assert site.accepted(name) < 32


@pytest.mark.parametrize("form", [rounded, noise])
def test_drafts_that_are_made_before_the_last_one_is_known_are_the_same(form: Coarse, monkeypatch) -> None:
    cases = {name: CASES[name] for name in ("greedy", "sampled", "filtered", "max tokens")}
    in_turn, fed, execute = with_drafts(cases, form, provisional=True), [], ModelRunner.execute
    monkeypatch.setattr(ModelRunner, "launches_async", property(lambda _: True))
    monkeypatch.setattr(ModelRunner, "execute", lambda *step: fed.append(any(step[3:4])) or execute(*step))
    ahead = with_drafts(cases, form, provisional=True)
    assert sum(fed) > 60
    for name in cases:
        assert_same(ahead, plain(), name)
        assert ahead.drafted(name) == in_turn.drafted(name) and ahead.accepted(name) == in_turn.accepted(name)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2", "gemma3"])
def test_greedy_answers_are_those_of_generate(family: str) -> None:
    want = generate(str(tiny_model(family)), tuple(PROMPT), LENGTH)
    for form in (exact, noise):
        site = with_drafts({"greedy": CASES["greedy"]}, form, family)
        assert site.answer("greedy")[0] == want
        if form is exact:
            assert site.accepted("greedy") == 64


@pytest.mark.parametrize("case", ["greedy", "sampled"])
def test_half_of_the_drafts_wrong(case: str) -> None:
    site = DecodeSite()
    transfer = site.begin(case, PROMPT, params_of(CASES[case]))
    transfer.send_coarse(exact)
    site.step(32)
    transfer.write(noise)
    site.run()
    transfer.send_exact()
    site.run()
    assert 32 <= site.accepted(case) < 48
    assert_same(site, plain(), case)


@pytest.mark.parametrize(("include", "form"), [(False, exact), (True, rounded), (False, noise)])
def test_stop_strings_cut_accepted_drafts_off(include: bool, form: Coarse) -> None:
    text = plain().answer("sampled")[1]
    stop = next(text[at : at + 3] for at in range(30, 60) if text.index(text[at : at + 3]) == at)
    case = {**SAMPLED, "stop": (stop,), "include_stop_in_output": include}
    site = with_drafts({"r": case}, form)
    assert_same(site, without_drafts({"r": case}), "r")
    tokens, said, reason, stop_reason, count = site.answer("r")
    assert reason is FinishReason.STOP and stop_reason == stop and len(tokens) == count < 64
    assert said == text[: text.index(stop) + (3 if include else 0)]
    case["min_tokens"] = count + 5  # the string comes too early to count
    later, other = with_drafts({"r": case}, form), without_drafts({"r": case})
    assert_same(later, other, "r")
    assert later.answer("r")[-1] > count + 5


@pytest.mark.parametrize("form", [exact, noise])
def test_stop_tokens_and_eos(form: Coarse) -> None:
    tokens = plain().answer("sampled")[0]
    cut = next(i for i in range(20, 60) if tokens[i] not in tokens[:i])
    stopping = {**SAMPLED, "stop_token_ids": (tokens[cut],)}
    cases = {
        "stop": stopping,
        "said": {**stopping, "include_stop_in_output": True},
        "later": {**stopping, "min_tokens": cut + 5},
        "eos": {**SAMPLED, "logit_bias": {256: 3.0}, "ignore_eos": False},
    }
    site, other = with_drafts(cases, form), without_drafts(cases)
    for name in cases:
        assert_same(site, other, name)
    assert [site.answer(name)[2] for name in ("stop", "said", "eos")] == [FinishReason.STOP] * 3
    assert site.answer("stop")[0] == tokens[: cut + 1] and site.answer("later")[-1] > cut + 5


def test_drafted_text_is_the_text_that_follows() -> None:
    site = with_drafts({"r": {**SAMPLED, "max_tokens": 65}}, exact, provisional=True)
    tokens, text, *_ = site.answer("r")
    drafts, drafted = site.drafted("r")
    assert drafts == tokens[1:] and len(drafts) == 64
    unfinished = text.removeprefix(site.of("r", Output)[0].text + drafted)
    assert unfinished in ("", "\N{REPLACEMENT CHARACTER}")  # the end of the output cuts a character


@pytest.mark.parametrize("form", [rounded, noise])
def test_what_is_cached_afterwards_is_exact(form: Coarse) -> None:
    site = with_drafts({"r": SAMPLED}, form)
    ids = [*PROMPT, *site.answer("r")[0]]
    full = (len(ids) - 1) // PAGE_SIZE
    (keys, values), _ = prefill(site.model, ids)
    for ours, theirs in zip(site.cached_pages(ids), (keys, values), strict=True):
        assert ours.shape[1] == full
        torch.testing.assert_close(ours, theirs[:, :full], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("at", [0, 1, 20])
def test_a_lost_or_repeated_transfer_changes_nothing(at: int) -> None:
    for lost in (False, True):
        site = DecodeSite()
        transfer = site.begin("logprobs", PROMPT, params_of(CASES["logprobs"]))
        transfer.send_coarse(rounded)
        site.step(at)
        if lost:
            transfer.lose()
        else:
            with site.engine.change() as requests:
                requests.drop_drafts("logprobs")
            transfer.write(noise)
            site.run()
            transfer.send_coarse(exact)
            site.run()
            transfer.send_exact()
        site.run()
        assert_same(site, plain(), "logprobs")
        assert [v.accepted for v in site.of("logprobs", Verified)] == [0] * bool(at) + [64] * (not lost)


def test_a_stop_string_in_the_first_token_leaves_the_other_sequences() -> None:
    """The sequence that the transfer writes for ends by it; the other one's KV is computed here."""
    site = DecodeSite()
    letters = dict.fromkeys(range(64, 90), 30.0)
    params = SamplingParams(max_tokens=8, temperature=3.0, n=2, seed=2, ignore_eos=True, logit_bias=letters)
    transfer = site.begin("free", PROMPT, params)
    transfer.send_exact()
    site.run()
    first, second = ([e for e in site.of("free", Output) if e.index == index] for index in range(2))
    stop = first[0].text
    assert stop and stop not in "".join(output.text for output in second)
    transfer = site.begin("stopped", PROMPT, replace(params, stop=(stop,)))
    transfer.send_exact()
    site.run()
    again = [token for e in site.of("stopped", Output) if e.index == 1 for token in e.token_ids]
    assert again == [token for output in second for token in output.token_ids]
    assert site.engine.status().pages.used == 0


def test_sixteen_requests_of_mixed_stages() -> None:
    """Some draft, some verify, some decode, some are cancelled; answers are the sequential ones."""
    rng = random.Random(4)
    asked = {str(i): prompt_of(rng.randint(20, 70), seed=i) for i in range(16)}
    params = {
        name: SamplingParams(
            max_tokens=rng.randint(10, 50), temperature=rng.choice([0.0, 0.8]), seed=int(name), stop=()
        )
        for name in asked
    }
    site = DecodeSite(num_pages=150, max_batch_tokens=128)
    waiting: dict[str, Transfer] = {name: site.begin(name, ids, params[name]) for name, ids in asked.items()}
    cancelled = set()
    while waiting or site.engine.pending():
        for name in rng.sample(sorted(waiting), k=min(len(waiting), 2)):
            transfer, draw = waiting[name], rng.random()
            if draw < 0.7:
                transfer.send_coarse(rng.choice([exact, rounded, noise]))
            elif draw < 0.9:
                waiting.pop(name).send_exact()
            else:
                cancelled.add(name)
                site.engine.abort(name)
                site.engine.release_lease(waiting.pop(name).lease)
        site.step(1)
    assert site.engine.status().pages.used == 0 and 0 < len(cancelled) < 8
    assert sum(len(site.of(name, Verified)) for name in asked) > 4
    for name in asked.keys() - cancelled:
        alone = DecodeSite(max_drafts=0)
        alone.begin(name, asked[name], params[name]).send_exact()
        alone.run()
        assert site.answer(name) == alone.answer(name)
