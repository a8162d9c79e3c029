"""A prefill worker, a process of its own on the same device, stopped and then killed in the middle of a transfer."""

import asyncio
import contextlib
import os
import signal

import pytest

from tests.cluster.test_equality import prompt_of
from tests.cluster.test_faults import value
from tests.e2e.test_worker_end import free_port, start
from tests.gpu.devices import CARRIED, CUDA, EXACT, LEAN, at_rest, forget, lean_cluster
from tests.models import tiny_model

FRAMES = 4
SILENCE_S = 2.0
CPU = pytest.param("cpu", marks=pytest.mark.chaos)
"""Each process takes seconds to start, and workers are killed in other tests, too."""


@contextlib.asynccontextmanager
async def prefill_process(order, folder, device, transport):
    """Its address and the process."""
    numbers = ("page_size", "max_batch_tokens", "max_running")
    flags = [part for name in numbers for part in (f"--{name.replace('_', '-')}", str(LEAN[name]))]
    flags += ["--dtype", LEAN["dtype"], "--kv-dtype", "bfloat16", "--eager"]
    flags += ["--model", str(folder), "--served-model-name", "tiny", "--device", device, "--transport", transport]
    port = free_port()
    process = await start("tests.gpu.signalled_prefill", str(order), *flags, port=port)
    assert process.returncode is None, process.log.read_text()
    try:
        yield f"127.0.0.1:{port}", process
    finally:
        process.kill()
        await asyncio.to_thread(process.wait)


@pytest.mark.parametrize("device", [CPU, CUDA])
@pytest.mark.parametrize("transport", CARRIED)
async def test_stopped_then_killed_in_the_middle(tmp_path, device, transport):
    order, folder, prompt = tmp_path / "order", tiny_model("llama"), prompt_of(400)
    async with (
        prefill_process(order, folder, device, transport) as (address, process),
        lean_cluster(folder, transport, device, prefill_count=0, decode={"max_drafts": 4}) as c,
    ):
        expected = (await c.ask(prompt, local=True)).tokens

        async def ask(codec):
            forget(c.decode)
            answer = await c.ask(prompt, codec=codec, workers=[address])
            assert answer.tokens == expected, codec
            await c.settled()
            return answer.summary

        for codec in EXACT:
            while (summary := await ask(codec)).codec != codec:
                assert "compiled on the prefill worker" in summary.codec_reason
                await asyncio.sleep(1)
            assert (summary.prefill_worker, summary.codec, summary.transport) == (address, codec, transport)
        c.fetcher.parts.silence_s = SILENCE_S
        order.write_text(f"{int(signal.SIGSTOP)} {FRAMES}")
        assert not (await ask("splitzip-progressive-ans")).prefill_worker
        os.kill(process.pid, signal.SIGCONT)
        assert (await ask("splitzip-progressive-ans")).prefill_worker == address  # what it did before is forgotten
        await at_rest(c)
        order.write_text(f"{int(signal.SIGKILL)} {FRAMES}")
        assert not (await ask("raw")).prefill_worker
        await at_rest(c)
        assert await asyncio.to_thread(process.wait, 30) == -signal.SIGKILL
        assert value(c.decode, "local") == 2
