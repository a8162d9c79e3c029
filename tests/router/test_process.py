"""The router as a process: what it imports, and how it ends."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvrail.errors import ConfigError
from kvrail.rpc.http_side import listen
from kvrail.text import Tokenizer
from kvrail.wire.v1 import decode_pb2
from tests.router.cluster import MODEL, summary, until
from tests.router.process import run_router

IMPORTS = """
import pkgutil, sys, importlib, kvrail.services.router
for module in pkgutil.walk_packages(kvrail.services.router.__path__, "kvrail.services.router."):
    importlib.import_module(module.name)
print(sorted(set(sys.modules) & {"torch", "transformers", "numpy", "kvrail.engine", "kvrail.codec"}))
"""


def test_router_never_imports_torch():
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_taken_port_is_a_configuration_error():
    taken = listen("127.0.0.1", 0)
    try:
        with pytest.raises(ConfigError, match="port"):
            listen("127.0.0.1", taken.getsockname()[1])
    finally:
        taken.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signal_lets_a_stream_finish_and_exits_with_0(
    model_folder: Path, tokenizer: Tokenizer, number: signal.Signals
):
    go_on = asyncio.Event()

    async def slow(worker, request):
        yield decode_pb2.GenerateReply(token_ids=[10], text="be")
        await go_on.wait()
        yield decode_pb2.GenerateReply(token_ids=[11], text="fore", finish_reason=decode_pb2.FINISH_REASON_STOP)
        yield decode_pb2.GenerateReply(summary=summary(1, 2))

    async with run_router(model_folder, tokenizer, slow) as running:
        process, http = running.process, running.http

        async def draining() -> bool:
            return await running.status() == "draining"

        body = {"model": MODEL, "prompt": "x", "stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            first = await anext(lines)
            process.send_signal(number)
            await until(draining)
            assert process.returncode is None
            go_on.set()
            text = first + "".join([line async for line in lines])
        assert "be" in text
        assert "fore" in text
        assert text.endswith("[DONE]")
        _, rest = await process.communicate()
        assert process.returncode == 0
        assert b"Traceback" not in rest
