"""Decode workers that say what cannot be: that request alone fails, by name, and none of it reaches others."""

import math

import pytest

from kvrail.errors import IncompatibleError
from kvrail.runtime.breaker import FAILURES
from kvrail.services.router.fleet.policy import WorkerState
from kvrail.services.router.fleet.prefixes import WorkerPages
from kvrail.wire.v1 import common_pb2, decode_pb2
from tests.router.cluster import VOCABULARY, Cluster, status, summary, until, write_output

STOP = decode_pb2.FINISH_REASON_STOP


def saying(*replies, **told):
    """A worker that says these, and then a summary that was changed so."""

    async def script(worker, request):
        for reply in replies:
            yield decode_pb2.GenerateReply(**reply)
        last = summary(len(request.prompt_token_ids), 1)
        for name, value in told.items():
            setattr(last, name, value)
        yield decode_pb2.GenerateReply(summary=last)

    return script


END = {"token_ids": [10], "text": "x", "finish_reason": STOP}


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (saying({"token_ids": [VOCABULARY]}), "token id 300"),
        (saying({"token_ids": [10] * 17, "finish_reason": STOP}), "tokens is 17"),
        (saying(END, {"token_ids": [10]}), "has ended"),
        (saying({**END, "stop_reason": "9" * 5000}), "ended a sequence"),
        (saying({**END, "finish_reason": 9}), "unknown reason 9"),
        (saying({**END, "logprobs": [common_pb2.TokenLogprobs(logprob=-1.0)]}), "log probabilities is 1"),
        (saying({"drafted": decode_pb2.Drafted(token_ids=[10])}), "not asked for"),
        (saying(END, exposed_s=math.nan), "exposed_s is nan"),
        (saying(END, completion_tokens=1 << 31), "completion_tokens is 2147483648"),
        (saying(END, {"summary": summary(1, 1)}), "second summary"),
        (saying(END, prompt_tokens=1 << 31), "prompt_tokens is 2147483648"),
    ],
)
async def test_output_that_cannot_be_fails_its_request(cluster: Cluster, script, reason):
    cluster.decode[0].script = script
    answer = await cluster.complete(prompt="hello there", max_tokens=16)
    assert answer.status_code >= 500 and reason in answer.json()["error"]["message"]
    cluster.decode[0].script = write_output
    assert (await cluster.complete()).status_code == 200


async def test_a_worker_whose_answers_cannot_be_is_left_alone_for_a_while(cluster: Cluster):
    cluster.decode[0].script = saying({"token_ids": [VOCABULARY]})
    for _ in range(FAILURES):
        await cluster.complete()
    await until(lambda: all(w.state is WorkerState.FAILING for w in cluster.service.pool.decode.values()))


async def test_a_status_that_cannot_be_takes_its_worker_out(cluster: Cluster, caplog: pytest.LogCaptureFixture):
    cluster.prefill[0].status = status(step_cost=common_pb2.StepCost(prefill_each=math.nan))
    (worker,) = cluster.service.pool.prefill.values()
    await until(lambda: worker.state is WorkerState.INCOMPATIBLE)
    assert "prefill_each is nan" in worker.detail
    assert f"{worker} is incompatible: the peer says" in caplog.text
    assert (await cluster.complete()).status_code == 200
    cluster.prefill[0].status = status()
    await until(lambda: worker.state is WorkerState.HEALTHY)


async def test_pages_of_a_form_that_the_router_does_not_know(cluster: Cluster):
    known = status().layout.SerializeToString()
    cluster.prefill[0].status = status(layout=common_pb2.KVLayout.FromString(known + bytes([15 << 3, 1])))
    (prefill,), (decode,) = cluster.service.pool.prefill.values(), cluster.service.pool.decode.values()
    await until(lambda: prefill.state is WorkerState.INCOMPATIBLE)
    assert "this router does not know" in prefill.detail
    cluster.decode[0].status = status(running=3)
    await until(lambda: decode.answer.running == 3)


async def test_what_cannot_be_judged_ends_no_watch(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    pool = cluster.service.pool
    with monkeypatch.context() as broken:
        broken.setattr(pool, "_judge", lambda worker: 1 / 0)
        await until(lambda: all(f"{worker}: its status could not be used" in caplog.text for worker in pool.workers))
    for fake in (*cluster.decode, *cluster.prefill):
        fake.status = status(draining=True)
    await until(lambda: all(worker.state is WorkerState.DRAINING for worker in pool.workers))


def test_a_worker_cannot_hold_more_pages_than_it_has():
    pages = WorkerPages()
    pages.take(common_pb2.KVEvents(stored=[1, 2], stored_to=2), 3)
    with pytest.raises(IncompatibleError, match="holds 4 pages, and that it has 3"):
        pages.take(common_pb2.KVEvents(stored=[3, 4], stored_to=4), 3)
    assert not len(pages) and pages.question().stored_to == 0
