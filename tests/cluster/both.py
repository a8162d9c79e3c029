"""Workers that prefill and decode, in one process; each is asked to decode, with the others as prefill workers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import torch

from kvrail.config.settings import BothSettings
from kvrail.rpc.channel import open_channel
from kvrail.rpc.client import DecodeClient
from kvrail.rpc.server import build_server
from kvrail.services.decode.prefill_workers import GrpcPrefillWorkers
from kvrail.services.prefill.observer import PageObserver
from kvrail.services.worker.serving import decode_servicer, fetcher_of, prefill_servicer
from kvrail.transfer.streams import SideStream
from kvrail.worker.codecs import Codecs
from kvrail.worker.monitor import Monitor
from kvrail.worker.process import build_worker
from kvrail.worker.weights import forms_of
from tests.cluster.cluster import Cluster, InprocWorkers, settings, transports_for
from tests.inproc.transport import InprocTransport


@asynccontextmanager
async def both_workers(folder, transport="tcp", count=2, authority=None, **changes) -> AsyncIterator[list[Cluster]]:
    """`count` workers, each as a Cluster whose decode worker it is."""
    shared = InprocTransport() if transport == "inproc" else transport
    options = settings(BothSettings, folder, **changes)
    tls = None if authority is None else authority.tls("worker")
    workers, servicers, clusters = {}, {}, []
    async with AsyncExitStack() as stack:
        for _ in range(count):
            side = SideStream(torch.device(options.device))
            observer = PageObserver(asyncio.get_running_loop(), side)
            codecs = Codecs(options, allow_lossy=options.allow_lossy)
            worker = build_worker(
                options,
                Monitor(options),
                side=side,
                listener=observer,
                max_drafts=options.max_drafts,
                weights=forms_of(options),
            )
            transports = await transports_for(shared, options, worker.model.loaded.device)
            stack.push_async_callback(transports.aclose)
            prefill = prefill_servicer(worker, options, codecs, transports, observer)
            channels = GrpcPrefillWorkers(tls)
            stack.push_async_callback(channels.close)
            reach = InprocWorkers(servicers) if transport == "inproc" else channels
            asked, first = codecs.check(options.codec), transports.first_codec(codecs.usual)
            fetcher = fetcher_of(worker, options, codecs, transports, asked, first, reach)
            rpc = await build_server(tls=tls)
            rpc.add_prefill(prefill)
            rpc.add_decode(decode_servicer(worker, fetcher, codecs))
            address = f"127.0.0.1:{rpc.bind('127.0.0.1', 0)}"
            channel = open_channel(address, tls=None if authority is None else authority.tls("router"))
            await rpc.start()
            stack.push_async_callback(asyncio.to_thread, worker.engine.stop)
            stack.push_async_callback(rpc.stop)
            stack.push_async_callback(channel.close)
            worker.engine.start()
            workers[address], servicers[address] = worker, prefill
            clusters.append((address, worker, DecodeClient(channel), fetcher))
        yield [
            Cluster(worker, {place: each for place, each in workers.items() if place != own}, client, fetcher)
            for own, worker, client, fetcher in clusters
        ]
