"""A router on a real port, with decode and prefill workers over real gRPC whose behaviour a test scripts."""

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from unittest.mock import patch

import httpx
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from kvrail.config.settings import RouterSettings
from kvrail.rpc.errors import maps_errors
from kvrail.rpc.events_server import DecodeService
from kvrail.rpc.http_side import listen
from kvrail.rpc.server import build_server
from kvrail.security.tls import Tls
from kvrail.services.router.fleet import workers
from kvrail.services.router.fleet.worker import NOT_ASKED
from kvrail.services.router.http.app import build_app
from kvrail.services.router.main import RouterServer
from kvrail.services.router.plan.defaults import Defaults
from kvrail.telemetry.moments import Moment
from kvrail.text import Tokenizer
from kvrail.wire import PROTOCOL_VERSION
from kvrail.wire.v1 import common_pb2, decode_pb2, prefill_pb2_grpc

OPENAIS = Defaults()
MODEL = "tiny"
VOCABULARY = 300
CONTEXT = 512
OUTPUT = "Hello world"
MARKS = (
    (Moment.ADMITTED, 0.001),
    (Moment.PREFILL_QUEUED, 0.002),
    (Moment.PREFILL_STARTED, 0.003),
    (Moment.PREFILL_FINISHED, 0.004),
    (Moment.FIRST_TOKEN, 0.005),
    (Moment.KV_COARSE, 0.0055),
    (Moment.KV_COMPLETE, 0.006),
    (Moment.VERIFIED, 0.0065),
    (Moment.FINISHED, 0.007),
)
TEMPLATE = (
    "{% for m in messages %}{% if m['content'] == 'forbidden' %}{{ raise_exception('not this word') }}{% endif %}"
    "{% if m['role'] != 'ghost' %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}{% if shout %}!{% endif %}{{ reasoning_effort }}"
)

Script = Callable[["FakeDecode", decode_pb2.GenerateRequest], AsyncIterator[decode_pb2.GenerateReply]]


def write_tokenizer(folder: Path, template: str = TEMPLATE, special: Sequence[str] = ()) -> None:
    """A byte-level BPE with a few merges, a chat template and a vocabulary of 300."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>", "<|user|>", "<|system|>", "<|assistant|>", *special],
        show_progress=False,
    )
    backend.train_from_iterator(["Hello world, hello there", "the quick brown fox"], trainer)
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY, "model_type": "llama"}))


def summary(prompt_tokens: int, completion_tokens: int) -> decode_pb2.GenerateSummary:
    """What a worker says at the end."""
    marks = [common_pb2.Mark(moment=moment.value, seconds=seconds) for moment, seconds in MARKS]
    return decode_pb2.GenerateSummary(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        cached_tokens=min(3, prompt_tokens),
        marks=marks,
        prefill_worker="p:1",
        codec="raw",
        kv_bytes=1000,
        kv_raw_bytes=1500,
    )


def logprobs_for(token_id: int, top: int) -> common_pb2.TokenLogprobs:
    """The chosen token at -0.5, neighbours below it, the last of them impossible."""
    found = [common_pb2.TopLogprob(token_id=token_id, logprob=-0.5)]
    found += [common_pb2.TopLogprob(token_id=(token_id + i) % 280, logprob=-1.0 - i) for i in range(1, top)]
    if top > 1:
        found[-1].logprob = float("-inf")
    return common_pb2.TokenLogprobs(logprob=-0.5, top=found[:top])


def prompt_score(place: int, token_id: int, top: int) -> tuple[float, int, list[int], list[float]]:
    """Of a prompt's token: log probability, rank, and the most likely tokens with theirs."""
    ids = [(token_id + i) % 280 for i in range(1, top + 1)]
    return -0.5 - place, 30, ids, [0.25 - place - i / 8 for i in range(top)]


def prompt_scores(request: decode_pb2.GenerateRequest, piece: int = 3) -> list[decode_pb2.GenerateReply]:
    """What a worker says of a prompt's log probabilities, a few tokens at a time."""
    sampling, ids = request.sampling, request.prompt_token_ids
    replies = []
    if sampling.HasField("prompt_logprobs"):
        for first in range(request.scored_tokens + 1, len(ids), piece):
            found = decode_pb2.PromptLogprobs(first=first, top=sampling.prompt_logprobs)
            for place in range(first, min(first + piece, len(ids))):
                logprob, rank, tops, values = prompt_score(place, ids[place], sampling.prompt_logprobs)
                found.logprobs.append(logprob)
                found.ranks.append(rank)
                found.top_ids.extend(tops)
                found.top_logprobs.extend(values)
            replies.append(decode_pb2.GenerateReply(prompt_logprobs=found))
    return replies


async def write_output(
    worker: "FakeDecode", request: decode_pb2.GenerateRequest
) -> AsyncIterator[decode_pb2.GenerateReply]:
    """Write OUTPUT as every sequence, a token at a time, in turns."""
    ids = worker.tokenizer.encode(OUTPUT, add_special_tokens=False)
    sampling = request.sampling
    cut = ids[: sampling.max_tokens]
    resumed = [len(each.token_ids) for each in request.resumed] or [0] * sampling.n
    assert all(list(each.token_ids) == cut[:done] for each, done in zip(request.resumed, resumed, strict=False))
    for reply in prompt_scores(request):
        yield reply
    last = decode_pb2.FINISH_REASON_LENGTH if len(cut) < len(ids) else decode_pb2.FINISH_REASON_STOP
    for position, token_id in enumerate(cut):
        for index in (number for number, done in enumerate(resumed) if position >= done):
            wanted = sampling.HasField("logprobs")
            yield decode_pb2.GenerateReply(
                index=index,
                token_ids=[token_id],
                text=worker.tokenizer.token_text(token_id),
                logprobs=[logprobs_for(token_id, sampling.logprobs)] if wanted else [],
                finish_reason=last if position == len(cut) - 1 else decode_pb2.FINISH_REASON_UNSPECIFIED,
            )
    await asyncio.sleep(MARKS[-1][1])  # the marks say that it took so long
    yield decode_pb2.GenerateReply(summary=summary(len(request.prompt_token_ids), len(cut) * sampling.n))


def status(**changes: object) -> common_pb2.WorkerStatus:
    """A healthy worker's answer."""
    model = common_pb2.ModelInfo(name=MODEL, fingerprint="f" * 64, vocab_size=VOCABULARY, max_model_len=CONTEXT)
    fields = {
        "model": model,
        "protocol_version": PROTOCOL_VERSION,
        "kv_cache": "plain",
        "codecs": ["raw", "splitzip"],
        "max_running": 8,
        "max_waiting": 8,
        "pages_total": 100,
        "pages_free": 50,
    }
    return common_pb2.WorkerStatus(**(fields | changes))


class FakeDecode(DecodeService):
    """A decode worker that follows `script` and keeps what it was asked."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.script: Script = write_output
        self.status = status()
        self.requests: list[decode_pb2.GenerateRequest] = []
        self.deadlines: list[float] = []
        self.cancelled = asyncio.Event()
        self.target = ""
        self.hung = False

    async def generate(self, request, write, until):
        self.requests.append(request)
        self.deadlines.append(until and until - time.monotonic())
        try:
            async with aclosing(self.script(self, request)) as replies:
                async for reply in replies:
                    await write(reply)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    @maps_errors
    async def GetStatus(self, request, context):
        while self.hung:
            await asyncio.sleep(0.01)
        return self.status


class FakePrefill(prefill_pb2_grpc.PrefillServicer):
    """A prefill worker that only says how it is."""

    def __init__(self) -> None:
        self.status = status()

    @maps_errors
    async def GetStatus(self, request, context):
        return self.status


class Cluster:
    """A running router and its workers."""

    def __init__(
        self, server: RouterServer, url: str, decode: list[FakeDecode], prefill: list[FakePrefill], ca: str = ""
    ) -> None:
        """ca: of the certificate that clients see."""
        self.server = server
        self.url = url
        self.decode = decode
        self.prefill = prefill
        verify = ssl.create_default_context(cafile=ca) if ca else True
        self.http = httpx.AsyncClient(base_url=url, timeout=20, verify=verify)

    @property
    def admin_url(self) -> str:
        port = self.server._admin[1].getsockname()[1]
        return f"https://localhost:{port}" if self.server._admin[0].config.ssl else f"http://127.0.0.1:{port}"

    @property
    def service(self):
        return self.server._app.state.service

    async def chat(self, **fields: object) -> httpx.Response:
        """Post a small chat."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]} | fields
        return await self.http.post("/v1/chat/completions", json=body)

    async def complete(self, **fields: object) -> httpx.Response:
        """Post a small completion."""
        return await self.http.post("/v1/completions", json={"model": MODEL, "prompt": "hi"} | fields)

    async def metric(self, name: str, path: str = "/metrics") -> float:
        """The value of one series, written as in the exposition format without the model's label."""
        for line in (await self.http.get(path)).text.splitlines():
            series, _, value = line.rpartition(" ")
            if series.replace(f'model_name="{MODEL}",', "").replace(f'model_name="{MODEL}"', "") == name:
                return float(value)
        raise AssertionError(f"no series {name} in {path}")


async def until(condition: Callable[[], bool | Awaitable[bool]]) -> None:
    """Wait for a condition; the test's own timeout bounds it."""
    while True:
        found = condition()
        if found if isinstance(found, bool) else await found:
            return
        await asyncio.sleep(0.01)


@asynccontextmanager
async def run_cluster(
    tokenizer: Tokenizer,
    *,
    decode: int = 1,
    prefill: int = 1,
    wait_healthy: bool = True,
    status_interval_s: float = 0.05,
    tls: Callable[[str], Tls | None] = lambda role: None,
    defaults: Defaults = OPENAIS,
    **settings: object,
) -> AsyncIterator[Cluster]:
    """Start workers and a router; everything ends with the block. tls: gives a worker's role its certificate."""
    async with AsyncExitStack() as stack:
        decoders_, prefills, targets = [], [], {"decode_workers": [], "prefill_workers": []}
        for role, count in (("decode", decode), ("prefill", prefill)):
            for _ in range(count):
                rpc = await build_server(tls=tls(role))
                worker = FakeDecode(tokenizer) if role == "decode" else FakePrefill()
                (rpc.add_decode if role == "decode" else rpc.add_prefill)(worker)
                target = f"127.0.0.1:{rpc.bind('127.0.0.1', 0)}"
                worker.target = target
                await rpc.start()
                stack.push_async_callback(rpc.stop)
                targets[f"{role}_workers"].append(target)
                (decoders_ if role == "decode" else prefills).append(worker)
        # Tests tell statuses and bytes, so a slow machine must not make a stream speak early.
        values = {
            "served_model_name": MODEL,
            "stream_head_s": 60.0,
            **targets,
            **settings,
        }
        chosen = RouterSettings(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
        with patch.object(workers, "STATUS_INTERVAL_S", status_interval_s):
            server = RouterServer(build_app(chosen, tokenizer, defaults), chosen)
        listener = listen("127.0.0.1", 0)
        server.open_admin(chosen)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        await until(lambda: server.started or task.done())
        port = listener.getsockname()[1]
        url = f"https://localhost:{port}" if chosen.tls_http_cert else f"http://127.0.0.1:{port}"
        cluster = Cluster(server, url, decoders_, prefills, chosen.tls_ca)
        try:
            if wait_healthy:
                await until(lambda: all(w.detail != NOT_ASKED for w in cluster.service.pool.workers))
            yield cluster
        finally:
            await cluster.http.aclose()
            server.stop()
            server.stop()  # the second time ends what still runs
            await asyncio.wait_for(task, 20)
