"""An engine over lossy pages says what the contract says, whatever runs beside a request and whatever is cached."""

import pytest
import torch

from kvrail import LLM, SamplingParams
from kvrail.config.settings import DEMO_MODEL
from kvrail.engine.attention import reference
from kvrail.engine.kv.closed.forms import CODE_BITS
from kvrail.errors import ConfigError
from tests.lossless.serving import demo_ids
from tests.lossless.serving import requests as requests_of_all_kinds
from tests.lossy.spec import Spec
from tests.models import kv_gib, tiny_model

MOST = {1: 3, 65: 130, 191: 70, 192: 3, 193: 3, 320: 70, 500: 20}
"""Tokens wanted behind a prompt of so many: over the ends of pages, the first of which closes when three follow."""
OPTIONS = {"device": "cpu", "kv_dtype": "bfloat16", "max_running": 6, "max_batch_tokens": 256, "max_model_len": 768}


def random_model() -> str:
    return str(tiny_model("llama", head_dim=64, num_hidden_layers=2))


def random_ids() -> list[int]:
    return [token % 256 for token in demo_ids()]


def said(requests, prompts, folder, form, made=Spec):
    """What the contract says, of each prompt."""
    spec, found = made(folder, CODE_BITS[form]), [requests[tuple(prompt)] for prompt in prompts]
    return [[spec.says(request, index) for index in range(request.params.n)] for request in found]


def asked(prompts, params, form, folder, **options):
    """All tokens, the requests as the engine got them, and the engine, whose books are right at the end."""
    with LLM(folder, kv_cache=form, **(OPTIONS | options)) as llm:
        requests, submit = {}, llm._engine.submit
        llm._engine.submit = lambda request: (requests.update({request.prompt_ids: request}), submit(request))
        results = llm.generate(prompts, params)
        llm._engine.check()
        return [[list(each.token_ids) for each in result.outputs] for result in results], requests, llm._engine


def answers(results):
    """All that the requests of a call were answered."""
    return [[(list(each.token_ids), repr(each.logprobs)) for each in result.outputs] for result in results]


@pytest.mark.parametrize(
    ("model", "form"),
    [
        ("random", "int8"),
        ("random", "int4"),
        ("demo", "int4"),
        ("random", "kvcomp"),
        ("demo", "kvcomp"),
        ("random", "rot3"),
        ("demo", "rot3"),
    ],
)
def test_tokens_are_those_of_the_contract(form: str, model: str) -> None:
    folder, ids, most = DEMO_MODEL, demo_ids(), {320: 5}
    if model == "random":
        folder, ids, most = random_model(), random_ids(), MOST
    if form == "int8" or (model == "random" and form in ("kvcomp", "rot3")):
        most = {191: 70, 320: 3}
    prompts = [ids[17 * number :][:length] for number, length in enumerate(most)]
    params = [
        SamplingParams(
            max_tokens=tokens,
            temperature=0.8 * (number % 2),
            seed=number,
            n=1 + number % 2,
            presence_penalty=0.5 * (number % 5 == 1),
            ignore_eos=True,
        )
        for number, tokens in enumerate(most.values())
    ]
    found, requests, engine = asked(prompts, params, form, folder, kv_memory_gib=0.02)
    assert engine._closer.pages >= 3
    assert found == said(requests, prompts, folder, form)


def test_requests_of_all_kinds_say_what_they_say_alone() -> None:
    """In few pages, so that some are preempted; over what is cached, and once more."""
    prompts, params = requests_of_all_kinds(6, 300, 100)
    prompts = [[token % 256 for token in prompt] for prompt in prompts]
    options = OPTIONS | {"max_model_len": 1024}
    with LLM(random_model(), kv_cache="int4", kv_memory_gib=0.02, prefix_cache=False, **options) as llm:
        alone = [answers(llm.generate([prompt], [each]))[0] for prompt, each in zip(prompts, params, strict=True)]
    with LLM(random_model(), kv_cache="int4", kv_memory_gib=kv_gib(random_model(), 12), **options) as llm:
        for _ in range(2):
            assert answers(llm.generate(prompts, params)) == alone
        llm._engine.check()
        assert llm._engine._scheduler.preemptions and llm._engine._closer.pages > 10


def test_a_page_with_a_refused_tile_stays_open_and_so_do_those_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    write = reference.write_pages

    def with_outliers(layer, key, value, slots):
        """Now and then a key has an element that no scale holds: a function of the key alone."""
        odd = key.view(torch.int32).sum(-1) % 701 == 0
        key = torch.where(odd[..., None] & (torch.arange(key.shape[-1]) == 5), 2.0**101, key)
        write(layer, key, value, slots)

    monkeypatch.setattr(reference, "write_pages", with_outliers)
    prompts = [random_ids()[number : number + length] for number, length in enumerate((230, 450))]
    params = SamplingParams(max_tokens=66, temperature=0, n=2, ignore_eos=True)
    found, requests, engine = asked(prompts, params, "int4", random_model(), kv_memory_gib=0.02)
    assert found == said(requests, prompts, random_model(), "int4")
    engine.report_load()
    assert engine._metrics.stuck_pages.value and engine._closer.pages


def test_what_has_no_such_form_is_refused_by_name() -> None:
    for options, what in (
        ({"kv_dtype": "float32"}, "kv_cache is 'int4', but keys of 64 float32"),
        ({"page_size": 48}, "multiples of 64"),
        ({"kv_memory_gib": 0.001}, "no closed page beside 2 open ones"),
    ):
        with pytest.raises(ConfigError, match=what):
            LLM(DEMO_MODEL, kv_cache="int4", device="cpu", **options)
