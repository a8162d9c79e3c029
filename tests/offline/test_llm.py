"""Offline use: outputs are transformers', errors name what is wrong, and nothing outlives the object."""

import functools
import gc
import os
import re
import runpy
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from kvrail import LLM, SamplingParams
from kvrail.config.settings import DEMO_MODEL
from kvrail.errors import ConfigError, ContextLengthError, InvalidRequestError, WorkerUnavailableError
from kvrail.offline.settings import Options
from tests.cluster.cluster import cluster
from tests.models import generate, reference_model, tiny_model

ROOT = Path(__file__).parents[2]
EOS = 256
TEXTS = ["the quick", "the lazy dog jumps over the fox " * 6, "o", "brown"]
OPTIONS = {"device": "cpu", "kv_dtype": "float32", "page_size": 16, "kv_memory_gib": 0.00074}  # 64 pages
CHAT = [{"role": "user", "content": "the fox"}]


@functools.cache
def folder():
    return str(tiny_model("llama"))


@functools.cache
def reference_tokenizer():
    return AutoTokenizer.from_pretrained(folder())


@pytest.fixture(scope="module")
def llm():
    with LLM(folder(), **OPTIONS) as made:
        yield made
        made._engine.check()


def ids_of(text):
    return reference_tokenizer()(text)["input_ids"]


def expected(ids, count):
    """What transformers continues with, greedily, up to the model's end."""
    tokens = generate(folder(), tuple(ids), count)
    return tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens


def text_of(tokens):
    return reference_tokenizer().decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def tokens_of(results):
    return [[output.token_ids for output in result.outputs] for result in results]


def engine_threads():
    return [thread for thread in threading.enumerate() if thread.name in ("engine", "llm")]


def until(holds):
    """Wait for what another thread does."""
    while not holds():
        time.sleep(0.01)


def test_greedy_outputs_are_those_of_transformers(llm):
    results = llm.generate(TEXTS, SamplingParams(temperature=0, max_tokens=24))
    assert [result.prompt for result in results] == TEXTS
    assert [result.prompt_token_ids for result in results] == [ids_of(text) for text in TEXTS]
    assert tokens_of(results) == [[expected(ids_of(text), 24)] for text in TEXTS]
    assert [result.outputs[0].text for result in results] == [text_of(expected(ids_of(text), 24)) for text in TEXTS]
    reasons = ["stop" if EOS in result.outputs[0].token_ids else "length" for result in results]
    assert [result.outputs[0].finish_reason for result in results] == reasons


def test_token_ids_are_prompts_too(llm):
    params = SamplingParams(temperature=0, max_tokens=6)
    several = llm.generate([ids_of(text) for text in TEXTS], params)
    assert tokens_of(several) == [[expected(ids_of(text), 6)] for text in TEXTS]
    assert tokens_of(llm.generate(ids_of("brown"), params)) == [[expected(ids_of("brown"), 6)]]
    assert several[0].prompt is None
    assert llm.generate([]) == []


def test_a_seed_gives_each_prompt_what_it_gets_alone(llm):
    params = [SamplingParams(seed=seed, n=2, max_tokens=12, ignore_eos=True) for seed in range(len(TEXTS))]
    together = tokens_of(llm.generate(TEXTS, params))
    assert together == [tokens_of(llm.generate(text, each))[0] for text, each in zip(TEXTS, params, strict=True)]
    assert all(first != second for first, second in together)


async def test_a_seed_gives_what_a_cluster_gives(llm):
    async with cluster(folder()) as served:
        asked = {"seed": 5, "n": 2, "max_tokens": 12, "temperature": 0.7, "top_p": 0.9, "ignore_eos": True}
        (result,) = llm.generate(TEXTS[1], SamplingParams(**asked))  # while a loop runs in this thread
        answer = await served.ask(result.prompt_token_ids, **asked)
    assert [output.token_ids for output in result.outputs] == [answer.tokens[0], answer.tokens[1]]
    assert [output.text for output in result.outputs] == [answer.text[0], answer.text[1]]


def test_without_a_seed_draws_differ_unless_the_llm_has_one(llm):
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    assert tokens_of(llm.generate("the", params)) != tokens_of(llm.generate("the", params))
    with LLM(folder(), seed=7, **OPTIONS) as first, LLM(folder(), seed=7, **OPTIONS) as second:
        drawn = [tokens_of(each.generate(["the", "the"], params)) for each in (first, second)]
    assert drawn[0] == drawn[1]
    assert drawn[0][0] != drawn[0][1]


def test_stop_strings_and_tokens_end_an_output(llm):
    tokens = expected(ids_of(TEXTS[1]), 24)
    whole = text_of(tokens)
    stop = next(char for char in whole[4:] if char.isascii() and char.isprintable())
    (result,) = llm.generate(TEXTS[1], SamplingParams(temperature=0, max_tokens=24, stop=stop))
    output = result.outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == (whole[: whole.index(stop)], "stop", stop)
    kept = tokens.index(tokens[3])
    (result,) = llm.generate(TEXTS[1], SamplingParams(temperature=0, max_tokens=24, stop_token_ids=[tokens[3]]))
    output = result.outputs[0]
    assert (output.token_ids, output.stop_reason) == (tokens[: kept + 1], tokens[3])


def test_log_probabilities_are_those_of_transformers(llm):
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=2, prompt_logprobs=1)
    (result,) = llm.generate(TEXTS[3] + TEXTS[0], params)
    prompt, output = result.prompt_token_ids, result.outputs[0]
    with torch.inference_mode():
        logits = reference_model(folder())(torch.tensor([prompt + output.token_ids])).logits[0]
    wanted = logits.log_softmax(-1)
    for place, token in enumerate(output.token_ids):
        row, told = wanted[len(prompt) - 1 + place], output.logprobs[place]
        assert told.logprob == pytest.approx(row[token].item(), abs=1e-3)  # float32, summed in another order
        assert [each for each, _ in told.top] == row.topk(2).indices.tolist()
    assert result.prompt_logprobs[0] is None
    found = [each.logprob for each in result.prompt_logprobs[1:]]
    assert found == pytest.approx([wanted[at, token].item() for at, token in enumerate(prompt[1:])], abs=1e-3)


def test_a_chat_is_written_by_the_models_template(llm):
    chats = [CHAT, [*CHAT, {"role": "assistant", "content": "o"}, {"role": "user", "content": "dog"}]]
    results = llm.chat(chats, SamplingParams(temperature=0, max_tokens=8))
    for chat, result in zip(chats, results, strict=True):
        text = reference_tokenizer().apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert result.prompt == text
        assert result.prompt_token_ids == ids_of(text)
        assert result.outputs[0].token_ids == expected(ids_of(text), 8)
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=1)
    (result,) = llm.chat(CHAT, params, add_generation_prompt=False, continue_final_message=True)
    assert result.prompt == "<|user|>the fox"
    assert len(result.outputs[0].logprobs) == 2


def test_structured_outputs_match(llm):
    params = SamplingParams(structured_outputs={"choice": ["the fox", "the dog"]}, n=3, max_tokens=32)
    (result,) = llm.generate("the", params)
    assert {output.text for output in result.outputs} <= {"the fox", "the dog"}
    assert {output.finish_reason for output in result.outputs} == {"stop"}


def test_grammars_match_whatever_the_tokenizer_takes_for_the_vocabulary(monkeypatch):
    """Gemma 3's larger configurations leave its size out; its logits are longer than the tokenizer."""
    monkeypatch.setattr("kvrail.text.tokenizer._vocab_size", lambda backend, _: backend.get_vocab_size())
    with LLM(str(tiny_model("llama", vocab_size=400)), **OPTIONS) as llm:
        assert llm._tokenizer.vocab_size < 300
        test_structured_outputs_match(llm)


def test_more_prompts_than_the_engine_lets_wait_are_served():
    with LLM(folder(), max_running=2, **OPTIONS) as narrow:
        results = narrow.generate(["o"] * 40, SamplingParams(temperature=0, max_tokens=1))
    assert tokens_of(results) == [[expected(ids_of("o"), 1)]] * 40


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": -1.0}, "^temperature: .*greater than or equal to 0.*got -1"),
        ({"max_tokens": "9"}, "^max_tokens: .*valid integer.*got '9'"),
        ({"stop": ["a", ""]}, "^stop.1: .*at least 1"),
        ({"logit_bias": {"fox": 1}}, "^logit_bias: .*'fox' is no token id"),
    ],
)
def test_a_wrong_parameter_is_named(arguments, message):
    with pytest.raises(InvalidRequestError, match=message):
        SamplingParams(**arguments)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda llm: llm.generate(["o", "o " * 5000]), ContextLengthError, "prompt 1: .*4096 tokens are the most"),
        (lambda llm: llm.generate([[9] * 4096]), ContextLengthError, "prompt 0: .*context holds 4096 .*has 4096"),
        (lambda llm: llm.generate(["o", ""]), InvalidRequestError, "prompt 1: prompt: has no tokens"),
        (lambda llm: llm.generate(["o", [9999]]), InvalidRequestError, "prompt 1: .*9999 .*vocabulary of 320"),
        (lambda llm: llm.generate(7), InvalidRequestError, "prompts is 7; give a text"),
        (lambda llm: llm.generate([7.5]), InvalidRequestError, "prompt 0: prompt: must be a string"),
        (lambda llm: llm.generate("o", {"n": 2}), InvalidRequestError, "sampling_params has"),
        (lambda llm: llm.generate(["o", "o"], [SamplingParams()]), InvalidRequestError, "1 entries for 2 prompts"),
        (lambda llm: llm.chat([{"content": "o"}]), InvalidRequestError, "prompt 0: messages.0.role: field required"),
        (
            lambda llm: llm.generate(["o", "o"], [SamplingParams(), SamplingParams(max_tokens=2000)]),
            ContextLengthError,
            "prompt 1: .*KV cache holds 1024; shorten the prompt or lower max_tokens",
        ),
    ],
)
def test_a_wrong_request_is_named_and_the_llm_goes_on(llm, call, error, message):
    with pytest.raises(error, match=message):
        call(llm)
    assert tokens_of(llm.generate("o", SamplingParams(temperature=0, max_tokens=2))) == [[expected(ids_of("o"), 2)]]
    until(lambda: llm._engine.status().pages.used == 0)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("./no/such/folder", {}, "'./no/such/folder' is not a folder"),
        (None, {"gpu_memory": 1}, "LLM has no argument gpu_memory; did you mean kv_memory_gib"),
        (None, {"kv_memory_gib": 9e9}, "^kv_memory_gib: .* GiB for pages are more than all memory here"),
        (None, {"host": "0.0.0.0"}, "LLM has no argument host; known are device, "),
        (None, {"page_size": 0}, "^page_size: 0 is not accepted: input should be greater than 0"),
        (None, {"max_model_len": 9999}, "max_model_len is 9999, but .* has a context of 4096; lower it"),
    ],
)
def test_a_wrong_argument_is_named(model, options, message):
    model = model or folder()
    before = threading.active_count()
    with pytest.raises(ConfigError, match=message):
        LLM(model, **options)
    assert threading.active_count() == before


def test_the_environment_of_services_does_not_count(monkeypatch):
    for name in ("DTYPE", "MAX_RUNNING", "KVRAIL_DECODE_PAGE_SIZE", "KVRAIL_ROUTER_GENERATION_CONFIG"):
        monkeypatch.setenv(name, "nonsense")
    LLM(folder(), **OPTIONS).close()


def test_close_ends_what_runs_and_its_threads():
    before = engine_threads()
    llm = LLM(folder(), **OPTIONS)
    failed = []

    def run():
        with pytest.raises(WorkerUnavailableError) as caught:
            llm.generate(["the"] * 20, SamplingParams(max_tokens=1000, ignore_eos=True))
        failed.append(caught)

    caller = threading.Thread(target=run)
    caller.start()
    until(lambda: llm._engine.status().running)
    llm.close()
    caller.join()
    assert failed
    assert engine_threads() == before
    llm.close()
    with pytest.raises(WorkerUnavailableError, match="this LLM is closed; make another one"):
        llm.generate("o")


def test_it_ends_where_no_thread_can_be_had(monkeypatch):
    """As at the end of the interpreter, of Python 3.12 and later."""
    llm, raised = LLM(folder(), **OPTIONS), []
    llm.generate("o", SamplingParams(structured_outputs={"choice": ["ab"]}))

    def start(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading, "excepthook", raised.append)
    monkeypatch.setattr(threading.Thread, "start", start)
    llm.close()
    assert raised == []


def test_threads_end_with_the_object():
    before = engine_threads()
    llm = LLM(folder(), **OPTIONS)
    llm.generate("o", SamplingParams(max_tokens=1))
    assert len(engine_threads()) == len(before) + 2
    del llm
    gc.collect()
    assert engine_threads() == before


def test_an_interrupt_ends_the_call_and_nothing_else(llm):
    def interrupt():
        until(lambda: llm._engine.status().running)
        os.kill(os.getpid(), signal.SIGINT)

    other = threading.Thread(target=interrupt)
    other.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["the"] * 20, SamplingParams(max_tokens=1000, ignore_eos=True))
    other.join()
    until(lambda: llm._engine.status().pages.used == 0)
    assert tokens_of(llm.generate("o", SamplingParams(temperature=0, max_tokens=2))) == [[expected(ids_of("o"), 2)]]


def test_importing_kvrail_is_light_and_a_missing_torch_is_named():
    script = """
import sys, kvrail
assert not {"torch", "pydantic", "kvrail.offline"} & sys.modules.keys()
kvrail.SamplingParams(temperature=0)
assert "torch" not in sys.modules
sys.modules["torch"] = None
try:
    kvrail.LLM
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert (done.stdout, done.returncode) == (
        "torch is not installed, and kvrail.LLM needs it; pip install 'kvrail[worker]'\n",
        0,
    ), done.stderr


def test_the_example_answers(capsys):
    runpy.run_path(str(ROOT / "examples" / "offline.py"))["main"](DEMO_MODEL)
    told = capsys.readouterr().out
    assert told.startswith("A pipe connects")  # the model was trained on it
    assert told.count("\nA socket is") == 4


@pytest.mark.parametrize("page", ["README.md", "docs/quick-start.md"])
def test_what_a_newcomer_runs_answers(page, capsys):
    (block,) = re.findall(r"```python\n( *from kvrail import LLM.*?)```", (ROOT / page).read_text(), re.S)
    exec(textwrap.dedent(block).replace("models/kvrail-demo", DEMO_MODEL))
    assert capsys.readouterr().out.startswith("A pipe connects the output of one process")


def test_the_page_names_every_argument():
    page = (ROOT / "docs" / "quick-start.md").read_text()
    assert [name for name in Options.__annotations__ if f"`{name}`" not in page] == []
