from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest

from kvrail.services.router.generate import prompt
from kvrail.text import Tokenizer, load_tokenizer
from tests.router.cluster import TEMPLATE, Cluster, run_cluster, write_tokenizer


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    folder.mkdir()
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    return load_tokenizer(str(model_folder))


@pytest.fixture
def few_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that workers refuse is asked again twice, not eight times, each after a while."""
    monkeypatch.setattr(prompt, "MAX_REFUSALS", 2)


@pytest.fixture
async def cluster(tokenizer: Tokenizer) -> AsyncIterator[Cluster]:
    async with run_cluster(tokenizer) as running:
        yield running


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


@pytest.fixture(scope="session")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The tokenizer of a model that reasons.

    Its template opens the reasoning where `opened` is set, shows that of the history, and takes `enable_thinking` as
    Qwen3's does.
    """
    folder = tmp_path_factory.mktemp("model") / "thinking"
    folder.mkdir()
    thought = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    off = "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    template = TEMPLATE.replace("{{ m['content'] }}", thought + "{{ m['content'] }}").replace(
        "{{ reasoning_effort }}", ""
    )
    write_tokenizer(folder, template + "{% if opened %}<think>\n{% endif %}" + off)
    return load_tokenizer(str(folder))
