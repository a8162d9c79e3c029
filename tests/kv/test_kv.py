"""The door for other engines: pages of plain tensors from one endpoint to another, over TCP, bit for bit."""

import asyncio
import subprocess
import sys
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvrail.errors import ConfigError, FrameError, IncompatibleError, KvrailError, TransferAbortedError
from kvrail.kv import KVEndpoint, KVLayout, KVPools

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
        with pytest.raises(asyncio.CancelledError):
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
        lambda offer: offer.replace(b'"version": 1', b'"version": 2'),
        lambda offer: offer.replace(b'"num_pages": 7', b'"num_pages": -7'),
        lambda offer: offer.replace(b'"num_pages": 7', b'"num_pages": "7"'),
        lambda offer: offer.replace(b'"page_size": 8', b'"page_size": 8.5'),
        lambda offer: offer.replace(b'"bfloat16"', b'"complex"'),
        lambda offer: offer.replace(b'"request": "r"', b'"request": 3'),
        lambda offer: offer.replace(b'"codecs": {', b'"codecs": {"raw2": null, '),
        lambda offer: offer.replace(b'["tcp", "', b'["tcp", "zz'),
        lambda offer: offer.replace(b'"key"', b'"clef"'),
        lambda offer: offer + b" " * 70_000,
    ],
)
async def test_a_malformed_offer_is_refused(damage):
    async with pair() as (there, here, _, _):
        offer = here.receive("r", HERE, host="127.0.0.1").offer
        assert damage(offer) != offer
        with pytest.raises(FrameError):
            there.send(damage(offer), THERE, print)


@pytest.mark.parametrize("message", [b"", b"Z", b"A{}", b"A[1]", b"Fabc", b"E123", b'A{"codec": 1, "transport": 2}'])
async def test_a_malformed_control_message_is_refused(message):
    async with pair() as (_, here, _, _):
        with pytest.raises(FrameError):
            here.receive("r", HERE, host="127.0.0.1").deliver(message)


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
    layers, keys = joined(1), whole(1)[0]

    async def start(pools, layout=LAYOUT, **options):
        await KVEndpoint.start(layout, pools, transport="tcp", **options)

    between = [layer.transpose(0, 1).contiguous().transpose(0, 1) for layer in layers]  # keys and values of a page
    for pools, layout, why in (
        (KVPools.by_layer(layers[:2]), LAYOUT, "the pools have 2 layers, the layout 3"),
        (KVPools.by_layer(between), LAYOUT, "not contiguous"),
        (KVPools.whole(keys, keys[..., :8].contiguous()), LAYOUT, "the layout wants"),
        (KVPools.by_layer(layers), replace(LAYOUT, dtype="float16"), "the layout wants"),
        (KVPools.by_layer([layer.to("meta") for layer in layers]), LAYOUT, "only the CPU and CUDA"),
    ):
        with pytest.raises(ValueError, match=why):
            await start(pools, layout)
    with pytest.raises(ValueError, match="codec 'splitzip-channel' takes"):
        await start(KVPools.by_layer([layer.float() for layer in layers]), replace(LAYOUT, dtype="float32"))
    with pytest.raises(ValueError, match="at least two frames"):
        await start(KVPools.by_layer(layers), receive_bytes=1)
    with pytest.raises(ConfigError, match="'grpc' is unknown"):
        await KVEndpoint.start(LAYOUT, KVPools.by_layer(layers), transport="grpc")


def test_the_example_moves_pages_between_two_processes():
    example = ROOT / "examples" / "move_pages.py"
    assert len(example.read_text().splitlines()) <= 60
    done = subprocess.run([sys.executable, example], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "received: every bit is there" in done.stdout and "sent 3145728 bytes of KV as" in done.stdout
