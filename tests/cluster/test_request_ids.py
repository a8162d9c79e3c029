"""A request id is the caller's word for a request: two calls of one id have nothing to do with each other."""

import asyncio
import threading

import pytest
from prometheus_client.openmetrics import parser as openmetrics

from tests.cluster.cluster import TRANSPORTS, cluster
from tests.cluster.test_equality import prompt_of
from tests.models import generate, tiny_model

SAME = "the-same"
SENT = ("kvrail_kv_transfer_seconds",)
RECEIVED = (*SENT, "kvrail_kv_exposed_transfer_seconds")


async def test_a_transfers_metrics_lead_to_a_request():
    async with cluster(tiny_model("llama")) as c:
        await c.ask(prompt_of(300), request_id="the-slow-one")
        await c.settled()
        for worker, names in ((c.decode, RECEIVED), (*c.prefills.values(), SENT)):
            text, _ = await worker.monitor.render("/metrics", "application/openmetrics-text")
            families = {each.name: each for each in openmetrics.text_string_to_metric_families(text.decode())}
            for name in names:
                found = [each.exemplar.labels for each in families[name].samples if each.exemplar]
                assert found == [{"request_id": "the-slow-one"}], name


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_calls_of_one_id_do_not_meet(transport):
    folder = tiny_model("llama")
    async with cluster(folder, transport) as c:
        prompts = [prompt_of(300, seed=number) for number in range(4)]
        answers = await asyncio.gather(*(c.ask(prompt, request_id=SAME) for prompt in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.tokens == {0: generate(str(folder), tuple(prompt), 16)} and answer.summary.prefill_worker
        await c.settled()


async def test_a_call_may_follow_one_of_its_id_that_was_given_up_in_its_prefill():
    """So a router moves a request from a worker that was lost: the prefill worker still computes for that one."""
    folder, prompt = tiny_model("llama"), prompt_of(300)
    async with cluster(folder) as c:
        (prefill,) = c.prefills.values()
        execute, computing, go_on = prefill.engine._runner.execute, threading.Event(), threading.Event()

        def held_up(*args):
            computing.set()
            go_on.wait(60)
            return execute(*args)

        prefill.engine._runner.execute = held_up
        lost = asyncio.create_task(c.ask(prompt, request_id=SAME))
        while not computing.is_set():
            await asyncio.sleep(0.005)
        lost.cancel()
        await asyncio.wait([lost])
        again = asyncio.create_task(c.ask(prompt, request_id=SAME))
        async with asyncio.timeout(60):
            while prefill.engine.status().waiting + prefill.engine.status().running < 1:
                await asyncio.sleep(0.005)
        go_on.set()
        answer = await again
        assert answer.tokens == {0: generate(str(folder), tuple(prompt), 16)} and answer.summary.prefill_worker
        await c.settled()
