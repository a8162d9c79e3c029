"""The door for other engines: pages of plain tensors from one endpoint to another, over TCP, bit for bit."""

import asyncio
import functools
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvrail.errors import (
    ConfigError,
    FrameError,
    IncompatibleError,
    KvrailError,
    OverloadedError,
    TransferAbortedError,
    WorkerUnavailableError,
)
from kvrail.kv import KVEndpoint, KVLayout, KVPools
from kvrail.kv import sending as sending_end

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, key_dim=16, value_dim=16, page_size=8, dtype="bfloat16")
PAGES = 24
THERE, HERE = [5, 2, 17, 11, 8, 23, 0], [1, 20, 3, 14, 9, 6, 4]
ROOT = Path(__file__).resolve().parents[2]


def joined(seed):
    """One tensor a layer: keys and values of all pages."""
    shape, generator = (2, PAGES, 8, 2, 16), torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).bfloat16() for _ in range(3)]


def apart(seed):
    return [(layer[0].clone(), layer[1].clone()) for layer in joined(seed)]


def whole(seed):
    return tuple(torch.stack([layer[part] for layer in joined(seed)]) for part in (0, 1))


KINDS = {
    "joined": lambda seed: (lambda t: (KVPools.by_layer(t), t))(joined(seed)),
    "apart": lambda seed: (lambda t: (KVPools.by_layer(t), t))(apart(seed)),
    "whole": lambda seed: (lambda t: (KVPools.whole(*t), list(zip(*t, strict=True))))(whole(seed)),
}


def bits(layers, pages):
    return [tuple(part[pages].view(torch.int16) for part in layer) for layer in layers]


def same(ours, theirs):
    return all(torch.equal(a, b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True))


@asynccontextmanager
async def pair(sender="whole", receiver="whole", **options):
    """Both ends, with what lies in their pools."""
    (out, sent), (into, landed) = KINDS[sender](1), KINDS[receiver](2)
    options = {"transport": "tcp", "max_frame_bytes": 1 << 20, **options}
    there = await KVEndpoint.start(LAYOUT, out, host="127.0.0.1", receive_bytes=0, **options)
    here = await KVEndpoint.start(LAYOUT, into, receive_bytes=4 << 20, **options)
    try:
        async with asyncio.timeout(120):
            yield there, here, sent, landed
    finally:
        await there.aclose()
        await here.aclose()


@pytest.mark.parametrize("codec", ["raw", "splitzip-channel", "splitzip-progressive-ans"])
@pytest.mark.parametrize("receiver", KINDS)
@pytest.mark.parametrize("sender", KINDS)
async def test_pages_cross_bit_for_bit_whatever_the_pools_are(sender, receiver, codec):
    async with pair(sender, receiver, codecs=[codec, "raw"]) as (there, here, sent, landed):
        around = [page for page in range(PAGES) if page not in HERE]
        before = bits(landed, around)
        receiving = here.receive("r", HERE, host="127.0.0.1")
        assert not receiving.poll()
        sending = there.send(receiving.offer, THERE, receiving.deliver)
        await sending.done()
        await receiving.done()
        assert same(bits(landed, HERE), bits(sent, THERE))
        assert same(bits(landed, around), before)
        assert receiving.poll() and sending.poll()
        assert receiving.counts.payload_bytes == sending.counts.payload_bytes
        assert receiving.counts.raw_bytes == len(HERE) * LAYOUT.page_bytes


async def test_layers_leave_as_they_are_computed_and_several_requests_share_the_way():
    async with pair("joined", "whole") as (there, here, sent, landed):
        first = here.receive("first", HERE[:4], host="127.0.0.1")
        second = here.receive("second", HERE[4:], host="127.0.0.1")
        slow = there.send(first.offer, THERE[:4], first.deliver, complete=False)
        await there.send(second.offer, THERE[4:], second.deliver).done()
        await second.done()
        for layer in range(3):
            slow.ready(range(layer, layer + 1), range(4))
            assert not first.poll()
        slow.finish()
        await first.done()
        assert same(bits(landed, HERE), bits(sent, THERE))


async def test_after_an_abort_nothing_is_written_and_the_other_end_learns_why():
    async with pair() as (there, here, _, landed):
        before = bits(landed, HERE)
        receiving = here.receive("r", HERE, host="127.0.0.1")
        sending = there.send(receiving.offer, THERE, receiving.deliver, complete=False)
        await asyncio.sleep(0.05)
        await sending.abort()
        with pytest.raises(TransferAbortedError, match="the sender gave up"):
            await receiving.done()
        again = here.receive("r", HERE, host="127.0.0.1")
        sending = there.send(again.offer, THERE, again.deliver, complete=False)
        await asyncio.sleep(0.05)
        await again.abort()
        sending.ready(range(3), range(len(THERE)))
        sending.finish()
        with pytest.raises(KvrailError):
            await sending.done()
        assert same(bits(landed, HERE), before)
        with pytest.raises(TransferAbortedError, match="at this end"):
            again.poll()


async def test_a_silent_sender_counts_as_lost():
    async with pair(silence_s=0.2) as (_, here, _, _):
        with pytest.raises(KvrailError, match=r"silent for 0\.2 s"):
            await here.receive("r", HERE, host="127.0.0.1").done()


async def test_ends_that_do_not_fit_are_refused_before_anything_leaves():
    async with pair() as (there, here, _, _):
        offer = here.receive("r", HERE, host="127.0.0.1").offer
        with pytest.raises(IncompatibleError, match="wants 7 pages; 6 are"):
            there.send(offer, THERE[:6], print)
        with pytest.raises(IncompatibleError, match="layouts differ"):
            there.send(offer.replace(b'"page_size": 8', b'"page_size": 4'), THERE, print)
        with pytest.raises(IncompatibleError, match="encrypt is True at the receiver, False here"):
            there.send(offer.replace(b'"encrypt": false', b'"encrypt": true'), THERE, print)
        with pytest.raises(IncompatibleError, match="no common codec"):
            there.send(offer.replace(b'"raw"', b'"row"').replace(b'"splitzip-channel"', b'"x"'), THERE, print)
        for pages in ([], [1, 1], [PAGES], [-1]):
            with pytest.raises(ValueError, match="distinct numbers below 24"):
                here.receive("r", pages)


@pytest.mark.parametrize(
    "damage",
    [
        lambda offer: offer[:-1],
        lambda offer: b"[]",
        lambda offer: offer.replace(b'"version": 2', b'"version": 3'),
        lambda offer: offer.replace(b'"num_pages": 7', b'"num_pages": -7'),
        lambda offer: offer.replace(b'"num_pages": 7', b'"num_pages": "7"'),
        lambda offer: offer.replace(b'"page_size": 8', b'"page_size": 8.5'),
        lambda offer: offer.replace(b'"bfloat16"', b'"complex"'),
        lambda offer: offer.replace(b'"encrypt": false', b'"encrypt": 0'),
        lambda offer: offer.replace(b'"request": "r"', b'"request": 3'),
        lambda offer: offer.replace(b'"codecs": {', b'"codecs": {"raw2": null, '),
        lambda offer: offer.replace(b'["tcp", "', b'["tcp", "zz'),
        lambda offer: offer.replace(b'"key"', b'"clef"'),
        lambda offer: offer + b" " * 70_000,
        lambda offer: b"[" * 60_000,
    ],
)
async def test_a_malformed_offer_is_refused(damage):
    async with pair() as (there, here, _, _):
        offer = here.receive("r", HERE, host="127.0.0.1").offer
        assert damage(offer) != offer
        with pytest.raises(FrameError):
            there.send(damage(offer), THERE, print)


MALFORMED = [b"", b"Z", b"A{}", b"A[1]", b"A" + b"[" * 60_000, b"Fabc", b"E123", b"Wx", b'A{"codec": 1}']


@pytest.mark.parametrize("message", MALFORMED)
async def test_a_malformed_control_message_fails_its_transfer_and_not_who_reads_the_channel(message):
    async with pair() as (_, here, _, _):
        receiving = here.receive("r", HERE, host="127.0.0.1")
        receiving.deliver(message)
        with pytest.raises(FrameError):
            await receiving.done()
        for _ in range(5000):  # what comes late is not kept
            receiving.deliver(message)
        await asyncio.sleep(0)
        assert receiving._messages.qsize() == 0


async def test_a_flood_of_control_messages_fails_its_transfer():
    async with pair() as (_, here, _, _):
        receiving = here.receive("r", HERE, host="127.0.0.1")
        for _ in range(5000):
            receiving.deliver(b"W")
        with pytest.raises(FrameError, match="does not accept"):
            await receiving.done()
        assert receiving._messages.qsize() <= 1025


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([b"E" + bytes(16)], "does not accept"),
        ([b'A{"codec": "lynx", "transport": "tcp", "address": ""}'], "chose codec 'lynx'"),
        ([b'A{"codec": "raw", "transport": "ucx", "address": ""}'], "transport 'ucx'"),
        ([b'A{"codec": "raw", "transport": "tcp", "address": ""}'], "data address"),
    ],
)
async def test_a_wrong_sender_fails_its_transfer_alone(messages, why):
    async with pair() as (there, here, sent, landed):
        receiving = here.receive("wrong", HERE[:3], host="127.0.0.1")
        for message in messages:
            receiving.deliver(message)
        with pytest.raises(KvrailError, match=why):
            await receiving.done()
        right = here.receive("right", HERE, host="127.0.0.1")
        there.send(right.offer, THERE, right.deliver)
        await right.done()
        assert same(bits(landed, HERE), bits(sent, THERE))


async def test_pools_that_do_not_fit_are_refused_by_name():
    layers, keys, lead = joined(1), whole(1)[0], (3, PAGES, 8, 2)
    eight, narrow = keys.to(torch.float8_e4m3fn), replace(LAYOUT, dtype="float8_e4m3fn")

    def unlike(tensor):
        """Tensors that a pool must not have beside keys or scales of the right shape: memory beyond them is written."""
        cut = [tensor[:2], tensor[:, :12], tensor[:, :, :4], tensor[:, :, :, :1], tensor.double(), tensor[..., None]]
        return [each.contiguous() if tensor is keys else (torch.ones(lead), each.contiguous()) for each in cut]

    async def start(pools, layout=LAYOUT, **options):
        await KVEndpoint.start(layout, pools, transport="tcp", **options)

    between = [layer.transpose(0, 1).contiguous().transpose(0, 1) for layer in layers]  # keys and values of a page
    for pools, layout, why in (
        (KVPools.by_layer(layers[:2]), LAYOUT, "the pools have 2 layers, the layout 3"),
        (KVPools.by_layer(between), LAYOUT, "not contiguous"),
        (KVPools.whole(keys, keys[..., :8].contiguous()), LAYOUT, "the layout wants"),
        (KVPools.by_layer(layers), replace(LAYOUT, dtype="float16"), "the layout wants"),
        (KVPools.by_layer([layer.to("meta") for layer in layers]), LAYOUT, "only the CPU and CUDA"),
        (KVPools.whole(*[torch.cat((keys, keys[:2]))] * 2), LAYOUT, "the pools have 5 layers, the layout 3"),
        (KVPools.by_layer([]), LAYOUT, "the pools have 0 layers, the layout 3"),
        (KVPools.by_layer(layers), replace(LAYOUT, dtype=torch.bfloat16), "is none of bfloat16, float16"),
        *[(KVPools.whole(keys, values), LAYOUT, "the layout wants") for values in unlike(keys)],
        *[(KVPools.whole(eight, eight, *scales), narrow, "the layout wants") for scales in unlike(torch.ones(lead))],
        (KVPools.whole(eight, eight, torch.ones(lead)), narrow, "the layout wants"),
    ):
        with pytest.raises(ValueError, match=why):
            await start(pools, layout)
    with pytest.raises(ValueError, match="codec 'splitzip-channel' takes"):
        await start(KVPools.by_layer([layer.float() for layer in layers]), replace(LAYOUT, dtype="float32"))
    for wrong in ({"codecs": []}, {"port": 99999}, {"port": -1}):
        with pytest.raises(ValueError, match="name a codec, and a port below 65536"):
            await start(KVPools.by_layer(layers), **wrong)
    with pytest.raises(ValueError, match="at least two frames"):
        await start(KVPools.by_layer(layers), receive_bytes=1)
    with pytest.raises(ValueError, match="at least two frames"):
        await start(KVPools.by_layer(layers), receive_bytes=1000, max_frame_bytes=500)
    with pytest.raises(ValueError, match="layer 0 has 24 parts"):
        KVPools.by_layer([layer.transpose(0, 1) for layer in layers])
    with pytest.raises(ConfigError, match="'grpc' is unknown"):
        await KVEndpoint.start(LAYOUT, KVPools.by_layer(layers), transport="grpc")


async def test_pages_may_be_an_array_and_the_callers_list_may_change():
    async with pair(codecs="raw") as (there, here, sent, landed):
        ours, theirs = list(HERE), torch.tensor(THERE)
        receiving = here.receive("r", ours, host="127.0.0.1")
        there.send(receiving.offer, theirs, receiving.deliver)
        ours.clear()
        theirs.zero_()
        await receiving.done()
        assert same(bits(landed, HERE), bits(sent, THERE))


async def test_what_cannot_be_is_refused_at_once():
    async with pair() as (there, here, _, _):
        with pytest.raises(ConfigError, match="only sends"):
            there.receive("r", HERE)
        with pytest.raises(ValueError, match="has 256 bytes; at most 255"):
            here.receive("ü" * 128, HERE)
        receiving = here.receive("ü" * 127, HERE, host="127.0.0.1")
        sending = there.send(receiving.offer, THERE, receiving.deliver, complete=False)
        for layers, pages in (
            (range(4), range(7)),
            (range(3), range(8)),
            (range(0), range(7)),
            (range(0, 3, 2), range(7)),
        ):
            with pytest.raises(ValueError, match="is no part of range"):
                sending.ready(layers, pages)
        with pytest.raises(TransferAbortedError, match="served already"):
            there.send(receiving.offer, THERE, receiving.deliver)
        sending.ready(range(3), range(7))
        sending.finish()
        await receiving.done()

        def elsewhere():
            with pytest.raises(RuntimeError, match="belongs to the event loop"):
                asyncio.run(asyncio.wait_for(in_a_loop(), 5))

        async def in_a_loop():
            here.receive("r", HERE)

        await asyncio.to_thread(elsewhere)
    with pytest.raises(WorkerUnavailableError, match="is closed; start another one"):
        here.receive("r", HERE)
    with pytest.raises(WorkerUnavailableError, match="is closed; start another one"):
        there.send(receiving.offer, THERE, receiving.deliver)


@pytest.mark.parametrize("codec", ["raw", "int8", "splitzip-progressive-ans"])
async def test_pools_may_be_of_inference_mode(codec):
    with torch.inference_mode():
        keys, values = (torch.zeros(3, PAGES, 8, 2, 16, dtype=torch.bfloat16) for _ in range(2))
    async with pair(codecs=[codec]) as (there, _, _, _):
        here = await KVEndpoint.start(LAYOUT, KVPools.whole(keys, values), transport="tcp", codecs=[codec])
        receiving = here.receive("r", HERE, host="127.0.0.1")
        there.send(receiving.offer, THERE, receiving.deliver)
        await receiving.done()
        assert keys[:, HERE].any() and values[:, HERE].any()
        await here.aclose()


async def test_the_first_stage_is_told_once():
    async with pair(codecs=["splitzip-progressive-ans"], max_frame_bytes=1 << 11) as (there, here, _, _):
        told = []
        receiving = here.receive("r", HERE, host="127.0.0.1", on_coarse=lambda: told.append(receiving.poll()))
        there.send(receiving.offer, THERE, receiving.deliver)
        await receiving.done()
        assert told == [False]


async def test_an_abort_reaches_who_waits_and_the_other_end_however_early_it_comes():
    async with pair() as (there, here, _, _):
        receiving = here.receive("r", HERE, host="127.0.0.1")
        sending = there.send(receiving.offer, THERE, receiving.deliver)
        waiting = asyncio.create_task(sending.done())
        await sending.abort()
        for ended, why in ((waiting, "at this end"), (receiving.done(), "gave up: it was aborted")):
            with pytest.raises(TransferAbortedError, match=why):
                await ended


async def test_any_thread_delivers_messages_and_says_what_is_ready():
    async with pair() as (there, here, sent, landed):
        asyncio.get_running_loop().set_debug(True)  # it refuses what other threads must not do
        receiving = here.receive("r", HERE, host="127.0.0.1")
        with ThreadPoolExecutor(1) as thread:
            control = functools.partial(thread.submit, receiving.deliver)
            sending = there.send(receiving.offer, THERE, control, complete=False)
            for layer in range(3):
                await asyncio.to_thread(sending.ready, range(layer, layer + 1), range(7))
            await asyncio.to_thread(sending.finish)
            await receiving.done()
        assert same(bits(landed, HERE), bits(sent, THERE))


async def test_a_sender_that_computes_is_not_silent_and_ends_though_the_engine_keeps_all_threads(monkeypatch):
    monkeypatch.setattr(sending_end, "HEARTBEAT_S", 0.05)
    async with pair(silence_s=0.5) as (there, here, sent, landed):
        receiving = here.receive("r", HERE, host="127.0.0.1")
        sending = there.send(receiving.offer, THERE, receiving.deliver, complete=False)
        await asyncio.sleep(1.5)
        leave, loop = threading.Event(), asyncio.get_running_loop()
        kept = [loop.run_in_executor(None, leave.wait) for _ in range(64)]
        sending.ready(range(3), range(7))
        sending.finish()
        try:
            await asyncio.wait_for(sending.done(), 30)
        finally:
            leave.set()
            await asyncio.gather(*kept)
        await receiving.done()
        assert same(bits(landed, HERE), bits(sent, THERE))


async def test_a_sender_is_not_blamed_for_memory_that_others_hold():
    async with pair() as (there, here, _, _):
        pool = here._transports["tcp"].pool
        assert pool._patience_s < here._silence_s
        pool._patience_s, held = 0.5, pool.take_now(4 << 20)
        receiving = here.receive("r", HERE, host="127.0.0.1")
        there.send(receiving.offer, THERE, receiving.deliver)
        with pytest.raises(OverloadedError, match=r"to receive into were free"):
            await receiving.done()
        held.release()


def test_the_example_moves_pages_between_two_processes():
    example = ROOT / "examples" / "move_pages.py"
    assert len(example.read_text().splitlines()) <= 60
    done = subprocess.run([sys.executable, example], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "received: every bit is there" in done.stdout and "sent 3145728 bytes of KV as" in done.stdout
