"""Drafts in the stream: who is told of them, in which shape, and what they add up to."""

import json

import openai
import pytest

from kvrail.errors import WorkerUnavailableError
from kvrail.wire.v1 import decode_pb2
from tests.router.cluster import MODEL, OUTPUT, Cluster, run_cluster, summary

HI = [{"role": "user", "content": "hi"}]
GUESSES = 4
RIGHT = 2


def drafting(*, dies=False):
    """A worker that sends one token, drafts four of which two are right, and says all of them."""

    async def script(worker, request):
        ids = worker.tokenizer.encode(OUTPUT, add_special_tokens=False)
        text = worker.tokenizer.token_text
        begin = len(request.resumed[0].token_ids) if request.resumed else 0
        for index in range(request.sampling.n):
            if not begin:
                yield decode_pb2.GenerateReply(index=index, token_ids=ids[:1], text=text(ids[0]))
        if request.provisional and not begin:
            for index in range(request.sampling.n):
                for number in range(GUESSES):
                    guess = ids[1 + number] if number < RIGHT else 7
                    drafted = decode_pb2.Drafted(position=1 + number, token_ids=[guess], text=text(guess))
                    yield decode_pb2.GenerateReply(index=index, drafted=drafted)
                if dies:
                    raise WorkerUnavailableError("the worker stops")
                verified = decode_pb2.Verified(position=1, proposed=GUESSES, accepted=RIGHT)
                yield decode_pb2.GenerateReply(index=index, verified=verified)
        for index in range(request.sampling.n):
            for number, token in enumerate(ids[max(1, begin) :], max(1, begin)):
                reason = decode_pb2.FINISH_REASON_STOP if number == len(ids) - 1 else 0
                yield decode_pb2.GenerateReply(index=index, token_ids=[token], text=text(token), finish_reason=reason)
        told = summary(len(request.prompt_token_ids), len(ids) * request.sampling.n)
        told.drafts_proposed, told.drafts_accepted, told.lossy = GUESSES, RIGHT, True
        yield decode_pb2.GenerateReply(summary=told)

    return script


def chunks_of(answer):
    return [json.loads(event.removeprefix("data: ")) for event in answer.text.split("\n\n")[:-2]]


def members(chunks):
    return [chunk["kvrail"] for chunk in chunks if "kvrail" in chunk]


def text_of(choice):
    return choice["text"] if "text" in choice else choice["delta"].get("content", "")


class Believer:
    """A client as docs/provisional-streaming.md describes it, for one choice."""

    def __init__(self, index):
        self.index, self.certain, self.drafts, self.confirmed = index, "", [], ""

    def take(self, chunk):
        news = {kind: n for kind, n in chunk.get("kvrail", {}).items() if n["index"] == self.index}
        if draft := news.get("provisional"):
            self.drafts = [d for d in self.drafts if d[0] < draft["position"]]
            self.drafts.append((draft["position"], draft["tokens"], draft["text"]))
        if confirm := news.get("confirm"):
            end = confirm["position"] + confirm["tokens"]
            self.confirmed = "".join(text for begin, _, text in self.drafts if begin < end)
            self.drafts = [d for d in self.drafts if d[0] >= end]
        if retract := news.get("retract"):
            self.drafts = [d for d in self.drafts if d[0] < retract["position"]]
        for choice in chunk["choices"]:
            if choice["index"] == self.index and text_of(choice):
                assert self.confirmed.startswith(text_of(choice)) or not self.confirmed
                self.confirmed = self.confirmed[len(text_of(choice)) :]
                self.certain += text_of(choice)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("chat", [True, False])
async def test_drafts_are_confirmed_or_withdrawn_and_the_text_is_the_same(cluster: Cluster, chat, n):
    cluster.decode[0].script = drafting()
    post = cluster.chat if chat else cluster.complete
    answer = await post(stream=True, n=n, kvrail={"provisional": True}, stream_options={"include_usage": True})
    chunks = chunks_of(answer)
    assert cluster.decode[0].requests[0].provisional
    for index in range(n):
        mine = [m for m in members(chunks) if next(iter(m.values()))["index"] == index]
        assert [next(iter(m)) for m in mine] == ["provisional"] * GUESSES + ["confirm"]
        assert [m["provisional"]["position"] for m in mine[:-1]] == [1, 2, 3, 4]
        assert mine[-1] == {
            "confirm": {"index": index, "position": 1, "tokens": RIGHT},
            "retract": {"index": index, "position": 1 + RIGHT},
        }
        believer = Believer(index)
        for chunk in chunks:
            believer.take(chunk)
        assert (believer.certain, believer.drafts, believer.confirmed) == (OUTPUT, [], "")
    for chunk in chunks:
        if "kvrail" in chunk:
            (choice,) = chunk["choices"]
            assert text_of(choice) == "" and choice["finish_reason"] is None and chunk["usage"] is None
    usage = chunks[-1]["usage"]["kvrail"]
    assert (usage["drafts_proposed"], usage["drafts_accepted"], usage["lossy"]) == (GUESSES, RIGHT, True)


@pytest.mark.parametrize("options", [{}, {"kvrail": {"provisional": False}}, {"kvrail": {"codec": "splitzip"}}])
async def test_default_clients_never_see_drafts(cluster: Cluster, options):
    cluster.decode[0].script = drafting()
    chunks = chunks_of(await cluster.chat(stream=True, **options))
    assert not cluster.decode[0].requests[0].provisional
    assert not members(chunks)
    assert "".join(text_of(choice) for chunk in chunks for choice in chunk["choices"]) == OUTPUT


async def test_the_official_client_reads_both(cluster: Cluster, client: openai.AsyncOpenAI):
    cluster.decode[0].script = drafting()
    stream = await client.chat.completions.create(
        model=MODEL, messages=HI, stream=True, extra_body={"kvrail": {"provisional": True}}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == OUTPUT
    assert sum("provisional" in (chunk.model_extra or {}).get("kvrail", {}) for chunk in chunks) == GUESSES


@pytest.mark.parametrize("post", ["chat", "complete"])
async def test_drafts_are_for_streams_alone(cluster: Cluster, post):
    answer = await getattr(cluster, post)(kvrail={"provisional": True})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "kvrail.provisional")
    assert "set stream to true" in error["message"]
    assert (await cluster.chat(stream=True, kvrail={"provisional": "yes"})).status_code == 400


async def test_drafts_of_a_worker_that_is_lost_are_withdrawn(tokenizer):
    async with run_cluster(tokenizer, decode=2) as cluster:
        for worker in cluster.decode:
            worker.script = drafting(dies=True)
        chunks = chunks_of(await cluster.chat(stream=True, kvrail={"provisional": True}))
        assert [next(iter(m)) for m in members(chunks)] == ["provisional"] * GUESSES + ["retract"]
        assert members(chunks)[-1] == {"retract": {"index": 0, "position": 1}}
        believer = Believer(0)
        for chunk in chunks:
            believer.take(chunk)
        assert (believer.certain, believer.drafts) == (OUTPUT, [])


async def test_times_to_the_kth_token(cluster: Cluster, tokenizer):
    cluster.decode[0].script = drafting()
    generated = len(tokenizer.encode(OUTPUT, add_special_tokens=False))
    await cluster.chat(stream=True, kvrail={"provisional": True})
    await cluster.chat(stream=True)
    await cluster.chat()
    for k in (1, 2, 8, 32, 64):
        for kind, count in (("verified", 3), ("provisional", 1)):
            found = await cluster.metric(f'kvrail_time_to_token_seconds_count{{k="{k}",kind="{kind}",}}')
            assert found == (count if k <= generated else 0), (k, kind)


async def test_a_codec_that_the_operator_withholds_is_refused_by_its_reason(cluster: Cluster):
    for worker in cluster.decode:
        worker.status.withheld_codecs.append("lynx")
    await cluster.service.pool.decode[cluster.decode[0].target].ask()
    answer = await cluster.chat(kvrail={"codec": "lynx"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "kvrail.codec")
    assert "'lynx' is lossy" in error["message"] and "--allow-lossy" in error["message"]
