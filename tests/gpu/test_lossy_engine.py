"""Whole models over lossy pages on CUDA: what the contract says, captured and not, alone and in company."""

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from kvrail import LLM  # noqa: E402
from kvrail.config.settings import DEMO_MODEL  # noqa: E402
from kvrail.engine.kv.closed.forms import CODE_BITS  # noqa: E402
from tests.lossless.serving import requests  # noqa: E402
from tests.lossy.spec import Spec  # noqa: E402
from tests.lossy.test_engine import answers, asked, said  # noqa: E402

OPTIONS = {"device": "cuda", "kv_dtype": "bfloat16", "max_running": 8, "max_batch_tokens": 256, "max_model_len": 768}


@pytest.mark.parametrize("form", CODE_BITS)
@pytest.mark.parametrize("eager", [True, False])
def test_tokens_are_those_of_the_contract(form: str, eager: bool) -> None:
    prompts, params = requests(10, 450, 200, seed=3)
    prompts = [[*prompt, number] for number, prompt in enumerate(prompts)]  # no two are equal
    found, seen, engine = asked(prompts, params, form, DEMO_MODEL, **OPTIONS, eager=eager, kv_memory_gib=0.05)
    assert engine._closer.pages > 10
    spec = Spec(DEMO_MODEL, CODE_BITS[form], device="cuda", eager=eager, step_tokens=OPTIONS["max_batch_tokens"])
    assert eager or spec.numerics == engine._runner.finding.numerics
    assert found == said(seen, prompts, DEMO_MODEL, form, lambda *_: spec)


@pytest.mark.parametrize("form", CODE_BITS)
def test_requests_of_all_kinds_say_what_they_say_alone(form: str) -> None:
    prompts, params = requests(60, 450, 250)
    with LLM(DEMO_MODEL, kv_cache=form, kv_memory_gib=0.05, prefix_cache=False, **OPTIONS) as llm:
        alone = [answers(llm.generate([prompt], [each]))[0] for prompt, each in zip(prompts, params, strict=True)]
    with LLM(DEMO_MODEL, kv_cache=form, kv_memory_gib=0.0085, **OPTIONS) as llm:
        for _ in range(2):
            assert answers(llm.generate(prompts, params)) == alone
        llm._engine.check()
        assert llm._engine._scheduler.preemptions and llm._engine._closer.pages > 80
