"""What requests that do not say are sampled with: the model's generation configuration and the operator's values."""

import json

import pytest

from kvrail.config.settings import RouterSettings
from kvrail.errors import ConfigError
from kvrail.services.router.plan.defaults import Defaults, defaults_of
from tests.router.cluster import MODEL, run_cluster

QWENS = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2], "min_p": None}
"""As Qwen3's generation_config.json is, but for the null."""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps(QWENS))
    return tmp_path


def of(folder, **settings):
    return defaults_of(RouterSettings(model=str(folder), **settings))


def test_the_models_own_are_found(folder):
    assert of(folder) == Defaults(temperature=0.6, top_k=20, top_p=0.95)
    assert of(folder, generation_config="none") == Defaults()


def test_a_model_without_any_has_openais(tmp_path):
    assert of(tmp_path) == Defaults(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0)


def test_another_folder_and_the_operators_values_win(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    (other / "generation_config.json").write_text('{"temperature": 0.2, "repetition_penalty": 1.05}')
    found = of(folder, generation_config=str(other), override_generation_config='{"max_new_tokens": 99, "top_k": 5}')
    assert found == Defaults(temperature=0.2, repetition_penalty=1.05, max_new_tokens=99, top_k=5)
    assert of(folder, override_generation_config={"temperature": None}).temperature == 1.0


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ('{"temperature": 3}', "temperature is 3: input should be less than or equal to 2; correct it"),
        ('{"top_k": 1.5}', "top_k is 1.5"),
        ('{"temprature": 1}', "'temprature' cannot be set; set some of temperature, top_p"),
    ],
)
def test_what_no_request_could_have_is_refused(folder, override, said):
    with pytest.raises(ConfigError, match="--override-generation-config") as refused:
        of(folder, override_generation_config=override)
    assert said in str(refused.value)


def test_a_broken_value_of_the_models_is_named_with_its_file_and_the_remedy(folder):
    (folder / "generation_config.json").write_text('{"top_p": 0}')
    with pytest.raises(ConfigError) as refused:
        of(folder)
    assert f"{folder}/generation_config.json: top_p is 0: " in str(refused.value)
    assert "--generation-config none" in str(refused.value)
    assert of(folder, override_generation_config={"top_p": 0.5}).top_p == 0.5


@pytest.mark.parametrize("given", ["temperature=1", "[1]", '{"temperature": "hot"}'])
def test_what_is_no_object_of_numbers_is_refused_by_the_flags_name(given):
    with pytest.raises(ConfigError, match="--override-generation-config"):
        RouterSettings.load({"override_generation_config": given})


async def test_requests_are_sampled_with_them_unless_they_say(tokenizer):
    defaults = Defaults(
        temperature=0.6,
        top_p=0.95,
        top_k=20,
        min_p=0.01,
        repetition_penalty=1.05,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        max_new_tokens=30,
    )
    messages = [{"role": "user", "content": "hi"}]
    async with run_cluster(tokenizer, defaults=defaults) as cluster:
        (worker,) = cluster.decode

        async def sampled(path="/v1/chat/completions", **fields):
            body = {"model": MODEL, "messages": messages} if "chat" in path or "messages" in path else {"model": MODEL}
            response = await cluster.http.post(path, json=body | fields)
            assert response.status_code == 200, response.text
            return worker.requests[-1].sampling, response.json()

        given, _ = await sampled()
        assert (given.max_tokens, given.top_k) == (30, 20)
        assert given.temperature == pytest.approx(0.6)
        assert (given.top_p, given.min_p) == pytest.approx((0.95, 0.01))
        assert given.repetition_penalty == pytest.approx(1.05)
        assert (given.presence_penalty, given.frequency_penalty) == (0.5, 0.25)

        neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
        given, _ = await sampled(**neutral, presence_penalty=0, frequency_penalty=0, max_tokens=50)
        assert (given.max_tokens, given.temperature, given.top_p, given.top_k) == (50, 1.0, 1.0, 0)
        assert (given.min_p, given.repetition_penalty) == (0.0, 1.0)
        assert (given.presence_penalty, given.frequency_penalty) == (0.0, 0.0)
        given, _ = await sampled(min_tokens=40)  # more than would be generated
        assert (given.min_tokens, given.max_tokens) == (40, 40)

        given, _ = await sampled("/v1/completions", prompt="hi")
        assert (given.max_tokens, given.top_k) == (16, 20)  # OpenAI's length
        given, _ = await sampled("/v1/completions", prompt="hi", max_tokens=None)
        assert given.max_tokens == 30
        given, _ = await sampled("/v1/messages", max_tokens=12)
        assert (given.max_tokens, given.top_k) == (12, 20)
        given, told = await sampled("/v1/responses", input="hi")
        assert (given.max_tokens, given.top_k) == (30, 20)
        assert (told["temperature"], told["top_p"]) == (0.6, 0.95)
        assert (told["presence_penalty"], told["frequency_penalty"]) == (0.5, 0.25)
