"""The wall clock jumps by hours while a router works: only the times of day that it tells follow."""

import asyncio
import time

from prometheus_client.parser import text_string_to_metric_families

from kvrail.wire.v1 import decode_pb2
from tests.clocks import HOUR, WallClock
from tests.router.cluster import MODEL, summary, until
from tests.router.process import run_router

LONG = 50
"""max_tokens of the answer that goes on through all jumps."""
JUMPS = (-6 * HOUR, 6 * HOUR)
"""gRPC makes of a timeout a time of day and of that a timeout again: a call that a jump meets between may fail, one."""
BODY = {"model": MODEL, "prompt": "x"}


async def test_no_deadline_and_no_metric_takes_the_wall_clock(model_folder, tokenizer, tmp_path, monkeypatch):
    clock, said, met, go_on = WallClock(tmp_path), [], [], asyncio.Queue()
    for name, value in clock.environment.items():
        monkeypatch.setenv(name, value)

    async def script(worker, request):
        if request.sampling.max_tokens == LONG:
            while (token := await go_on.get()) is not None:
                said.append(token)
                yield decode_pb2.GenerateReply(token_ids=[10], text=token)
        yield decode_pb2.GenerateReply(token_ids=[11], text="end", finish_reason=decode_pb2.FINISH_REASON_STOP)
        yield decode_pb2.GenerateReply(summary=summary(1, 2))

    async with run_router(model_folder, tokenizer, script) as running:
        http = running.http
        long = asyncio.create_task(http.post("/v1/completions", json=BODY | {"max_tokens": LONG}))
        go_on.put_nowait("begin ")
        for jump in JUMPS:
            clock.set(jump)

            async def seen(jump=jump):
                answer = await http.post("/v1/completions", json=BODY)
                if answer.status_code != 200:
                    met.append(answer.text)
                    assert len(met) <= 1 + JUMPS.index(jump), met
                    return False
                assert answer.json()["choices"][0]["text"] == "end", answer.text
                return abs(answer.json()["created"] - time.time() - jump) < 60

            await until(seen)
            assert await running.status() == "ok" and not long.done()
            go_on.put_nowait(f"{jump} ")
        go_on.put_nowait(None)
        assert (await long).json()["choices"][0]["text"] == "".join(said) + "end"
        families = text_string_to_metric_families((await http.get("/metrics")).text)
        sums = {sample.name: sample.value for family in families for sample in family.samples if "_sum" in sample.name}
        seconds = {name: value for name, value in sums.items() if name.endswith("_seconds_sum")}
        assert seconds and all(0 <= value < HOUR for value in seconds.values()), seconds
