"""Whether an answer's bits depend on where and beside what it was computed: in usage and in /health."""

import pytest

from kvrail.text import Tokenizer
from kvrail.wire.v1 import common_pb2
from tests.router.cluster import CONTEXT, MODEL, VOCABULARY, run_cluster, status, until, write_output
from tests.router.scripts import dying


def computing(numerics: str, **load: object) -> common_pb2.WorkerStatus:
    """The answer of a worker that has found these."""
    model = common_pb2.ModelInfo(
        name=MODEL, fingerprint="f" * 64, vocab_size=VOCABULARY, max_model_len=CONTEXT, numerics=numerics
    )
    return status(model=model, **load)


def saying(numerics: str):
    """A worker whose output ends with these."""

    async def script(worker, request):
        async for reply in write_output(worker, request):
            if reply.HasField("summary"):
                reply.summary.numerics = numerics
            yield reply

    return script


async def shown(cluster, numerics: list[str]) -> None:
    """Wait until /health has what each decode worker found."""
    for worker, each in zip(cluster.decode, numerics, strict=True):
        worker.status = computing(each, running=cluster.decode.index(worker))
    workers = cluster.service.pool.decode
    await until(lambda: [workers[each.target].describe().get("numerics") or "" for each in cluster.decode] == numerics)


async def invariant(cluster) -> bool:
    answer = await cluster.complete(prompt="the fox")
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["kvrail"]["invariant"]


@pytest.mark.parametrize(("found", "said"), [("aa", "aa"), ("aa", ""), ("", "")])
async def test_usage_says_what_the_worker_says(tokenizer: Tokenizer, found: str, said: str):
    async with run_cluster(tokenizer) as cluster:
        await shown(cluster, [found])
        cluster.decode[0].script = saying(said)
        assert await invariant(cluster) is bool(said)
        (worker,) = cluster.service.health()[1]["decode_workers"].values()
        assert (worker["invariant"], worker["numerics"]) == (bool(found), found or None)


@pytest.mark.parametrize("other", ["aa", "bb"])
async def test_a_move_to_a_worker_of_other_bits_is_told(tokenizer: Tokenizer, other: str):
    async with run_cluster(tokenizer, decode=2) as cluster:
        await shown(cluster, ["aa", other])
        cluster.decode[0].script, cluster.decode[1].script = dying(2), saying(other)
        assert await invariant(cluster) is (other == "aa")
