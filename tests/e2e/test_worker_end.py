"""SIGTERM in a worker's first seconds, when threads still compile kernels beside the requests, idle and under load.

KVRAIL_END_ROUNDS=10 tries it so often.
"""

import asyncio
import os
import re
import signal
import socket

import httpx
import pytest

from kvrail.errors import WorkerUnavailableError
from kvrail.rpc.channel import open_channel
from kvrail.rpc.client import DecodeClient
from kvrail.values.sampling import SamplingParams
from kvrail.wire.convert import sampling_to_proto
from kvrail.wire.v1 import decode_pb2
from tests.forked import MODULE, Forked
from tests.models import tiny_model
from tests.scratch import new_folder

ROUNDS = int(os.environ.get("KVRAIL_END_ROUNDS", "1"))
STREAMS, TOKENS = 4, 30
LOG_LINE = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z (DEBUG|INFO) ")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def start(module: str, *arguments: str, port: int) -> Forked:
    """A worker, healthy, or ended."""
    metrics_port = free_port()
    flags = ["--port", str(port), "--metrics-port", str(metrics_port), "--kv-memory-gib", "0.025"]
    process = Forked([*arguments, *flags], new_folder("worker") / "log", module)
    async with httpx.AsyncClient(trust_env=False) as http:
        while process.returncode is None:
            try:
                if (await http.get(f"http://127.0.0.1:{metrics_port}/health", timeout=5)).status_code == 200:
                    break
            except httpx.TransportError:
                await asyncio.sleep(0.05)
    return process


async def ended(process: Forked) -> str:
    """What it said, once it has ended; its status is `returncode`."""
    await asyncio.to_thread(process.wait, 60)
    return process.log.read_text()


async def ended_well(process: Forked) -> None:
    """It ended with 0 and said nothing but log lines."""
    said = await ended(process)
    assert process.returncode == 0, said
    assert [line for line in said.splitlines() if not LOG_LINE.match(line)] == []


async def stream(client: DecodeClient, number: int, begun: asyncio.Event) -> int:
    """Tokens of one answer."""
    request = decode_pb2.GenerateRequest(
        request_id=f"r{number}",
        model="kvrail-demo",
        prompt_token_ids=[5, 6, 7 + number],
        sampling=sampling_to_proto(SamplingParams(max_tokens=TOKENS, ignore_eos=True)),
    )
    tokens = 0
    async with client.events.submit(request, timeout_s=120) as replies:
        async for reply in replies:
            tokens += len(reply.token_ids)
            begun.set()
    return tokens


@pytest.mark.parametrize("wait_s", [0.3 * turn for turn in range(ROUNDS)])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_sigterm_right_after_ready(role: str, wait_s: float):
    process = await start(MODULE, role, port=0)
    await asyncio.sleep(wait_s)
    process.send_signal(signal.SIGTERM)
    await ended_well(process)


@pytest.mark.parametrize("turn", range(ROUNDS))
async def test_sigterm_under_load_lets_answers_end(turn: int):
    port = free_port()
    process = await start(MODULE, "decode", port=port)
    async with open_channel(f"127.0.0.1:{port}") as channel:
        client, begun = DecodeClient(channel), [asyncio.Event() for _ in range(STREAMS)]
        answers = [asyncio.create_task(stream(client, number, each)) for number, each in enumerate(begun)]
        for each in begun:  # a request that has not come by then is asked to go elsewhere
            await each.wait()
        process.send_signal(signal.SIGTERM)
        assert await asyncio.gather(*answers) == [TOKENS] * STREAMS
        await ended_well(process)
        await client.close()


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("raises", "the worker ends: the engine has given up"),
        ("hangs", "the worker ends: a step has not ended within 2 s: the device hangs"),
        ("forgets", "the worker ends: 0 sequences wait and 1 run, but for 2 s no step was taken"),
        ("blocks", "in hangs"),  # in the traceback of the thread whose loop it is
    ],
)
async def test_a_worker_that_is_broken_ends(how: str, why: str):
    port = free_port()
    model = ["--model", str(tiny_model("llama")), "--served-model-name", "kvrail-demo"]
    process = await start("tests.e2e.broken_worker", how, "--step-timeout-s", "2", *model, port=port)
    async with open_channel(f"127.0.0.1:{port}") as channel:
        client = DecodeClient(channel)
        for number in range(3):
            with pytest.raises(WorkerUnavailableError):
                await stream(client, number, asyncio.Event())
        said = await ended(process)
        await client.close()
    assert process.returncode == 1
    assert why in said
