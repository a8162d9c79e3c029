"""An engine over lossy pages says what the contract says, whatever runs beside a request and whatever is cached."""

import pytest

from kvrail import LLM, SamplingParams
from kvrail.config.settings import DEMO_MODEL
from tests.lossless.serving import demo_ids
from tests.lossy.spec import Spec
from tests.models import tiny_model

BITS = {"int8": 8, "int4": 4}
LENGTHS = (1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 320, 500)
OPTIONS = {"device": "cpu", "kv_dtype": "bfloat16", "max_running": 6, "max_batch_tokens": 256, "max_model_len": 768}


def asked(prompts, params, form, folder=DEMO_MODEL, **options):
    """All tokens, the requests as the engine got them, and the engine, whose books are right at the end."""
    with LLM(str(folder), kv_cache=form, **(OPTIONS | options)) as llm:
        requests, submit = {}, llm._engine.submit
        llm._engine.submit = lambda request: (requests.update({request.prompt_ids: request}), submit(request))
        results = llm.generate(prompts, params)
        llm._engine.check()
        return [[list(each.token_ids) for each in result.outputs] for result in results], requests, llm._engine


@pytest.mark.parametrize("form", BITS)
@pytest.mark.parametrize("model", ["demo", "random"])
def test_tokens_are_those_of_the_contract(form: str, model: str) -> None:
    folder = DEMO_MODEL if model == "demo" else tiny_model("llama", head_dim=64)
    ids = [token % 256 for token in demo_ids()] if model == "random" else demo_ids()
    prompts = [ids[17 * number :][:length] for number, length in enumerate(LENGTHS)]
    params = [
        SamplingParams(
            max_tokens=140 if number % 4 == 3 else 70,
            temperature=0.8 * (number % 2),
            seed=number,
            n=1 + number % 3,
            presence_penalty=0.5 * (number % 5 == 1),
            ignore_eos=True,
        )
        for number in range(len(LENGTHS))
    ]
    found, requests, engine = asked(prompts, params, form, folder, kv_memory_gib=0.02)
    assert engine._closer.pages > 20
    spec = Spec(str(folder), BITS[form])
    for prompt, outputs in zip(prompts, found, strict=True):
        request = requests[tuple(prompt)]
        assert outputs == [spec.says(request, index) for index in range(request.params.n)]
