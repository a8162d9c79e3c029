"""A prefill and a decode worker in one process, over any transport, asked the way the router asks."""

import asyncio
import itertools
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import torch

from kvrail.config.settings import DecodeSettings, PrefillSettings
from kvrail.rpc.channel import open_channel
from kvrail.rpc.client import DecodeClient
from kvrail.rpc.server import build_server
from kvrail.services.decode.fetcher import Fetcher
from kvrail.services.decode.prefill_workers import GrpcPrefillWorkers
from kvrail.services.prefill.observer import PageObserver
from kvrail.services.prefill.servicer import PrefillServicer
from kvrail.services.worker.serving import decode_servicer, fetcher_of, prefill_servicer
from kvrail.transfer.streams import SideStream
from kvrail.transport import ucx
from kvrail.values.sampling import SamplingParams
from kvrail.wire.convert import sampling_to_proto
from kvrail.wire.v1 import decode_pb2
from kvrail.worker.codecs import Codecs
from kvrail.worker.monitor import Monitor
from kvrail.worker.process import Worker, build_worker
from kvrail.worker.transports import Transports
from kvrail.worker.weights import forms_of
from tests.inproc.prefill import InprocPrefillClient
from tests.inproc.transport import InprocTransport
from tests.models import kv_gib

MODEL = "tiny"
WITHOUT_UCX = ucx.available()
assert not (WITHOUT_UCX and os.environ.get("CI")), WITHOUT_UCX
TRANSPORTS = ["inproc", "tcp", pytest.param("ucx", marks=pytest.mark.skipif(bool(WITHOUT_UCX), reason=WITHOUT_UCX))]


def each_with_a_transport(values):
    """Parameters: each value with one of the transports, which take turns."""
    marked = [pytest.param(each) if isinstance(each, str) else each for each in TRANSPORTS]
    pairs = zip(values, itertools.cycle(marked))
    return [pytest.param(value, *transport.values, marks=transport.marks) for value, transport in pairs]


@dataclass
class Answer:
    tokens: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list] = field(default_factory=dict)
    finish: dict[int, int] = field(default_factory=dict)
    stop_reason: dict[int, str] = field(default_factory=dict)
    news: list = field(default_factory=list)  # every reply with drafts or output, in order
    summary: decode_pb2.GenerateSummary | None = None


class InprocWorkers:
    def __init__(self, servicers: dict[str, PrefillServicer]) -> None:
        self._servicers = servicers

    def client(self, address: str) -> InprocPrefillClient:
        return InprocPrefillClient(self._servicers[address].answer)


class Cluster:
    def __init__(self, decode: Worker, prefills: dict[str, Worker], client: DecodeClient, fetcher: Fetcher) -> None:
        self.decode = decode
        self.fetcher = fetcher
        self.prefills = prefills
        self.client = client
        self._ids = itertools.count()

    async def ask(
        self,
        prompt,
        *,
        local=False,
        workers=None,
        codec="",
        on_reply=None,
        request_id="",
        resumed=(),
        provisional=False,
        fingerprint="",
        timeout_s=120.0,
        cache_salt="",
        kv_cache="",
        exact=False,
        **params,
    ) -> Answer:
        params = {"max_tokens": 16, "temperature": 0.0, "ignore_eos": True, **params}
        request = decode_pb2.GenerateRequest(
            request_id=request_id or f"r{next(self._ids)}",
            model=MODEL,
            prompt_token_ids=prompt,
            sampling=sampling_to_proto(SamplingParams(**params)),
            prefill_workers=[] if local else list(workers or self.prefills),
            codec=codec,
            resumed=[decode_pb2.Resumed(token_ids=ids, ended=ended) for ids, ended in resumed],
            provisional=provisional,
            model_fingerprint=fingerprint,
            cache_salt=cache_salt,
            kv_cache=kv_cache,
            exact=exact,
        )
        answer = Answer()
        async with self.client.events.submit(request, timeout_s=timeout_s) as replies:
            async for reply in replies:
                index = reply.index
                if reply.HasField("summary"):
                    answer.summary = reply.summary
                    continue
                answer.news.append(reply)
                answer.tokens.setdefault(index, []).extend(reply.token_ids)
                answer.text[index] = answer.text.get(index, "") + reply.text
                answer.logprobs.setdefault(index, []).extend(reply.logprobs)
                if reply.finish_reason:
                    answer.finish[index] = reply.finish_reason
                    answer.stop_reason[index] = reply.stop_reason
                if on_reply is not None:
                    on_reply(reply)
        return answer

    async def settled(self) -> None:
        """Wait until nothing runs anywhere, then check every worker's books."""
        for worker in (self.decode, *self.prefills.values()):
            async with asyncio.timeout(30):
                await worker.calls.drained()
                while worker.engine.status().pages.used:
                    await asyncio.sleep(0.01)
            worker.engine.check()


def settings(cls, folder, *, num_pages=200, max_frame_bytes=0, **changes):
    """num_pages, max_frame_bytes: of exactly this many pages and this size of frames, which no setting gives."""
    if max_frame_bytes:
        cls = type(cls.__name__, (cls,), {"max_frame_bytes": property(lambda _: max_frame_bytes)})
    defaults = {
        "model": str(folder),
        "served_model_name": MODEL,
        "dtype": "float32",
        "kv_dtype": "float32",
        "page_size": 64,
        "max_batch_tokens": 512,
    }
    own = {"local_prefill_tokens": 0} if issubclass(cls, DecodeSettings) else {}
    values = {**defaults, **own, **{k: v for k, v in changes.items() if k in cls.model_fields}}
    if os.path.isdir(folder):  # tests of settings alone name no model
        values["kv_memory_gib"] = kv_gib(folder, num_pages, values["kv_dtype"], values["page_size"])
    return cls(**values)


async def transports_for(transport, options, device):
    """Of one worker, or in process of all."""
    if isinstance(transport, InprocTransport):
        return Transports([transport])
    return await Transports.start(options.model_copy(update={"transport": transport}), device)


def _certificates(authority, shared):
    """What gives a role its certificate; that settings name any is what transports look for."""
    if authority is not None:
        shared |= authority.settings("decode")
    return lambda role: None if authority is None else authority.tls(role)


@asynccontextmanager
async def cluster(
    folder, transport="tcp", prefill_count=1, prefill=None, decode=None, authority=None, **shared
) -> AsyncIterator[Cluster]:
    tls = _certificates(authority, shared)
    loop = asyncio.get_running_loop()
    stops = []
    here = transport == "inproc"
    transport = InprocTransport() if here else transport
    prefills, servicers = {}, {}
    for number in range(prefill_count):
        options = settings(PrefillSettings, folder, **{**shared, **(prefill or {})})
        side = SideStream(torch.device(options.device))
        observer = PageObserver(loop, side)
        codecs = Codecs(options, allow_lossy=True)
        worker = build_worker(
            options,
            Monitor(options),
            side=side,
            listener=observer,
            weights=forms_of(options),
        )
        codecs.check_codebook(worker.model.loaded)
        transports = await transports_for(transport, options, worker.model.loaded.device)
        stops.append(transports.aclose)
        servicer = prefill_servicer(worker, options, codecs, transports, observer)
        address = f"inproc-{number}"
        if not here:
            rpc = await build_server(tls=tls("prefill"))
            rpc.add_prefill(servicer)
            address = f"127.0.0.1:{rpc.bind('127.0.0.1', 0)}"
            await rpc.start()
            stops.insert(0, rpc.stop)
        worker.engine.start()
        prefills[address], servicers[address] = worker, servicer
    options = settings(DecodeSettings, folder, **{**shared, **(decode or {})})
    codecs = Codecs(options, allow_lossy=options.allow_lossy)
    worker = build_worker(
        options,
        Monitor(options),
        max_drafts=options.max_drafts,
        weights=forms_of(options),
    )
    codecs.check_codebook(worker.model.loaded)
    channels = GrpcPrefillWorkers(tls("decode"))
    reach = InprocWorkers(servicers) if here else channels
    transports = await transports_for(transport, options, worker.model.loaded.device)
    asked, first = codecs.check(options.codec), transports.first_codec(codecs.usual)
    fetcher = fetcher_of(worker, options, codecs, transports, asked, first, reach)
    rpc = await build_server(tls=tls("decode"))
    rpc.add_decode(decode_servicer(worker, fetcher, codecs))
    channel = open_channel(f"127.0.0.1:{rpc.bind('127.0.0.1', 0)}", tls=tls("router"))
    await rpc.start()
    worker.engine.start()
    try:
        yield Cluster(worker, prefills, DecodeClient(channel), fetcher)
    finally:
        await channel.close()
        await rpc.stop()
        await channels.close()
        await transports.aclose()
        for stop in stops:
            await stop()
        for each in (worker, *prefills.values()):
            await asyncio.to_thread(each.engine.stop)
