"""Drafts on coarse KV of real (tiny) models: the answers are those without drafts, and transformers' own."""

import functools
import random
from dataclasses import replace

import pytest
import torch

from kvrail.engine.request.events import Output
from kvrail.values.sampling import FinishReason, SamplingParams
from tests.engine.drafting import PAGE_SIZE, Coarse, DecodeSite, deliver, exact, noise, prefill, rounded
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


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2", "gemma3"])
def test_greedy_answers_are_those_of_generate(family: str) -> None:
    want = generate(str(tiny_model(family)), tuple(PROMPT), LENGTH)
    for form in (exact, noise):
        site = with_drafts({"greedy": CASES["greedy"]}, form, family)
        assert site.answer("greedy")[0] == want
        if form is exact:
            assert site.accepted("greedy") == 64


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
