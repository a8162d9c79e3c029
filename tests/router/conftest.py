from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest

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
async def cluster(tokenizer: Tokenizer) -> AsyncIterator[Cluster]:
    async with run_cluster(tokenizer) as running:
        yield running


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


@pytest.fixture(scope="session")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The tokenizer of a model that reasons; its template opens the reasoning where `opened` is set."""
    folder = tmp_path_factory.mktemp("model") / "thinking"
    folder.mkdir()
    write_tokenizer(folder, TEMPLATE + "{% if opened %}<think>\n{% endif %}")
    return load_tokenizer(str(folder))
