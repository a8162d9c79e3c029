"""Streams whose first token is late, as clients and parsers that others wrote read them.

Each reads two streams: one that is silent between headers and first event, one that is kept alive meanwhile.
"""

import asyncio
import os
import re
import shutil
from pathlib import Path

import pytest

from kvrail.text import Tokenizer, load_tokenizer
from tests.clients.environments import node_with_clients, python_with
from tests.router.cluster import MODEL, OUTPUT, run_cluster, write_output, write_tokenizer

ASKING = Path(__file__).with_name("asking")
LIMIT_S = 300
KEEP_ALIVE_S = 0.05


async def late(worker, request):
    """A worker whose first and second token take several times as long as headers and keep-alive."""
    replies = write_output(worker, request)
    for _ in range(2):
        await asyncio.sleep(4 * KEEP_ALIVE_S)
        yield await anext(replies)
    async for reply in replies:
        yield reply


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    folder = tmp_path / MODEL
    folder.mkdir()
    write_tokenizer(folder)
    return load_tokenizer(str(folder))


async def read(tokenizer: Tokenizer, keep_alive_s: float, command: list[str], cwd: Path) -> dict[str, str]:
    """The text that each client of a command has read."""
    async with run_cluster(tokenizer, stream_head_s=0.01, keep_alive_s=keep_alive_s) as cluster:
        cluster.decode[0].script = late
        told = {"BASE_URL": cluster.url, "MODEL": MODEL, "LITELLM_LOCAL_MODEL_COST_MAP": "true"}
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command, cwd=cwd, env={**os.environ, **told}, stdout=pipe, stderr=asyncio.subprocess.STDOUT
        )
        try:
            said, _ = await asyncio.wait_for(process.communicate(), LIMIT_S)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode == 0, said.decode()[-4000:]
        return dict(re.findall(r"^read: (\S+) (.*)$", said.decode(), re.MULTILINE))


@pytest.mark.clients
@pytest.mark.parametrize(
    ("environment", "clients", "keep_alive_s"),
    [
        ("parsers", ["httpx-sse", "sseclient-py", "requests", "aiohttp-sse-client2"], 0.0),
        ("parsers", ["httpx-sse", "sseclient-py", "requests", "aiohttp-sse-client2"], KEEP_ALIVE_S),
        pytest.param("langchain", ["langchain"], 0.0, marks=pytest.mark.heavy),
        ("langchain", ["langchain"], KEEP_ALIVE_S),
        pytest.param("litellm", ["openai", "hosted_vllm", "anthropic"], 0.0, marks=pytest.mark.heavy),
        ("litellm", ["openai", "hosted_vllm", "anthropic"], KEEP_ALIVE_S),
    ],
)
async def test_python(tokenizer: Tokenizer, keep_alive_s: float, environment: str, clients: list[str]):
    command = [await asyncio.to_thread(python_with, environment), str(ASKING / f"read_{environment}.py")]
    assert await read(tokenizer, keep_alive_s, command, ASKING) == dict.fromkeys(clients, OUTPUT)


@pytest.mark.clients
@pytest.mark.parametrize("keep_alive_s", [0.0, KEEP_ALIVE_S])
async def test_node(tokenizer: Tokenizer, keep_alive_s: float):
    node, folder = await asyncio.to_thread(node_with_clients)
    script = shutil.copy(ASKING / "read_streams.mjs", folder)  # beside the packages, where node looks for them
    clients = ["eventsource-parser", "fetch-event-source", "openai", "anthropic", "ai"]
    assert await read(tokenizer, keep_alive_s, [node, script], folder) == dict.fromkeys(clients, OUTPUT)
