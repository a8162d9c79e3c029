"""splitzip-ans on a GPU: the CPU's payloads bit for bit, decoded at either end; damage is refused."""

import struct
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1] / "codec"))

from ans_cases import SPECIAL, codes, rare, with_end, with_words_before, wrong_ends  # noqa: E402
from kv_blocks import bits_of, copy_of, random_block, scattered, spec_of  # noqa: E402

from kvrail.codec import registry  # noqa: E402
from kvrail.codec.base import Block, CodecError, PagedBlock  # noqa: E402
from kvrail.codec.splitzip.entropy import cpu, gpu_launch  # noqa: E402
from kvrail.codec.splitzip.entropy.format import BLOCK_BYTES, num_blocks  # noqa: E402
from kvrail.codec.splitzip.entropy.payload import coded_bytes  # noqa: E402
from kvrail.codec.splitzip.tiles.format import FORMATS  # noqa: E402

HEADER_BYTES, LENGTHS = 32, struct.Struct("<5Q")
SHAPES = [
    (2, 3, 64, 8, 128, 128),
    (1, 33, 64, 8, 128, 64),
    (3, 2, 16, 4, 96, 80),
    (1, 5, 63, 1, 33, 31),
    (2, 2, 500, 1, 3, 2),
    (1, 1, 1, 1, 1, 1),
]
PIECES = {
    **{name: [piece[: piece.size // 4 * 4]] for name, piece in SPECIAL.items() if piece.size >= 4},
    "three": [codes(100_000), rare(1 << 20), codes(132)],
    "a million": [codes(1 << 20, 5)],
}


@pytest.fixture(scope="module")
def codec():
    return registry.get("splitzip-ans")


def log_normal(spec, device="cuda", seed=1):
    """Scattered pages whose channels have log-normal scales; some values are tiny, so that there are escapes."""
    pages = scattered(spec, seed, device)
    generator = torch.Generator().manual_seed(seed)
    for tensor in (pages.pools.keys, pages.pools.values):
        scales = torch.exp(0.5 * torch.randn(tensor.shape[-2:], generator=generator))
        drawn = torch.randn(tensor.shape, generator=generator) * scales
        drawn[torch.rand(tensor.shape, generator=generator) < 0.001] *= 2.0**-20
        tensor.copy_(drawn.to(tensor.dtype))
    return pages


def on_cpu(pages):
    """The same pages of a copy of the pool in host memory."""
    return PagedBlock(Block(*(tensor.cpu() for tensor in pages.pools.tensors())), pages.layers, pages.page_ids)


def restores(codec, payload, pages, device):
    out = scattered(pages.spec, 99, device)
    wanted = copy_of(out)
    wanted.scatter(Block(*(tensor.to(device) for tensor in pages.gather().tensors())))
    codec.decode(0, [payload], out)
    torch.cuda.synchronize()
    assert bits_of(out.pools) == bits_of(wanted.pools)


@pytest.mark.parametrize("name", PIECES)
def test_pieces_are_the_cpus_and_come_back(name):
    pieces = PIECES[name]
    inner = torch.from_numpy(np.concatenate(pieces)).cuda()
    ends = np.cumsum([0, *(piece.size for piece in pieces)]).tolist()
    places = [slice(begin, begin + piece.size) for begin, piece in zip(ends, pieces, strict=False)]
    found = gpu_launch.launch_code(inner, places)
    words = np.diff(found.ends.cpu().numpy()[np.cumsum([num_blocks(piece.size) for piece in pieces]) - 1], prepend=0)
    sizes = [coded_bytes(piece.size, int(count)) for piece, count in zip(pieces, words, strict=True)]
    begins = np.cumsum([0, *sizes]).tolist()
    sources = [slice(begin, begin + size) for begin, size in zip(begins, sizes, strict=False)]
    payload = torch.full((begins[-1],), 0xA5, dtype=torch.uint8, device="cuda")
    gpu_launch.launch_place(found, begins[:-1], payload)
    for source, wanted in zip(sources, map(cpu.compress, pieces), strict=True):
        assert payload[source].cpu().numpy().tobytes() == wanted.tobytes()
    out, wrong = torch.full_like(inner, 0xA5), torch.zeros(1, dtype=torch.int32, device="cuda")
    gpu_launch.launch_decode_pieces(payload, sources, out, places, wrong)
    assert torch.equal(out, inner) and not wrong.item()


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_payloads_are_the_cpus_and_decode_at_either_end(codec, shape, dtype):
    for pages in (log_normal(spec_of(shape, dtype)), scattered(spec_of(shape, dtype), 4, "cuda")):
        encoding = codec.encode(pages, on_device=True)
        (device,), (host,) = encoding.stages(), codec.encode(pages).stages()
        (wanted,) = codec.encode(on_cpu(pages)).stages()
        assert device.is_cuda and device.cpu().numpy().tobytes() == bytes(host) == bytes(wanted)
        assert encoding.stats() == codec.encode(on_cpu(pages)).stats()
        restores(codec, device, pages, "cuda")
        restores(codec, wanted, pages, "cuda")
        restores(codec, host, pages, "cpu")


def test_ends_that_cross_and_words_that_no_lane_asks_for_are_seen():
    large, small = codes(3 * BLOCK_BYTES), codes(256)
    coded_large, coded_small = cpu.compress(large), cpu.compress(small)
    cases = [(with_end(coded_large, large.size, *where), large) for where in wrong_ends(coded_large, large.size)]
    cases += [(with_words_before(coded_small, small.size), small), (coded_large, large), (coded_small, small)]
    verdicts = []
    for coded, piece in cases:
        out, wrong = torch.zeros(piece.size, dtype=torch.uint8, device="cuda"), torch.zeros(1, dtype=torch.int32).cuda()
        payload, source, place = torch.from_numpy(coded).cuda(), slice(0, coded.size), slice(0, piece.size)
        gpu_launch.launch_decode_pieces(payload, [source], out, [place], wrong)
        verdicts.append(bool(wrong.item()))
    assert verdicts == [True] * (len(cases) - 2) + [False] * 2


def test_it_is_smaller_than_any_fixed_width(codec):
    pages = log_normal(spec_of(SHAPES[1], "bfloat16"))
    sizes = {
        name: registry.get(name).encode(pages).stages()[0].nbytes
        for name in ("splitzip", "splitzip-channel", "splitzip-ans")
    }
    assert sizes["splitzip-ans"] < 0.97 * sizes["splitzip-channel"]


def test_random_bits_grow_by_the_lengths_alone(codec):
    spec = spec_of(SHAPES[0], "bfloat16")
    (payload,) = codec.encode(PagedBlock.whole(random_block(spec, 1, "cuda"))).stages()
    assert payload.nbytes <= spec.raw_bytes + HEADER_BYTES + LENGTHS.size + 16 * 3


def test_a_payload_may_begin_at_any_address(codec):
    pages = log_normal(spec_of(SHAPES[2], "bfloat16"))
    (payload,) = codec.encode(pages, on_device=True).stages()
    for shift in (1, 2, 4, 8):
        memory = torch.zeros(payload.numel() + 16, dtype=torch.uint8, device="cuda")
        memory[shift : shift + payload.numel()] = payload
        restores(codec, memory[shift : shift + payload.numel()], pages, "cuda")


def test_corrupt_pieces_are_refused_and_pages_stay(codec):
    pages = log_normal(spec_of(SHAPES[0], "bfloat16"))
    payload = bytes(codec.encode(pages).stages()[0])
    lengths = LENGTHS.unpack_from(payload, HEADER_BYTES)
    start = HEADER_BYTES + LENGTHS.size + lengths[0]
    assert lengths[1] < pages.spec.raw_bytes // 8
    out, rng = scattered(pages.spec, 2, "cuda"), np.random.default_rng(0)
    before = bits_of(out.pools)
    spots = [0, 8, 200, 512, 516, lengths[1] // 3, lengths[1] - 1, *rng.integers(0, lengths[1], 40).tolist()]
    for at in spots:
        wrong = bytearray(payload)
        wrong[start + at] ^= int(rng.integers(1, 256))
        for source in (memoryview(wrong), torch.frombuffer(wrong, dtype=torch.uint8).cuda()):
            with pytest.raises(CodecError, match="coded piece"):
                codec.decode(0, [source], out)
    torch.cuda.synchronize()
    assert bits_of(out.pools) == before
    restores(codec, memoryview(payload), pages, "cuda")  # nothing stays broken


def test_corrupt_payloads_are_refused_or_stay_in_their_pages(codec):
    pages = log_normal(spec_of(SHAPES[2], "bfloat16"))
    payload = bytes(codec.encode(pages).stages()[0])
    out, rng = scattered(pages.spec, 2, "cuda"), np.random.default_rng(1)
    others, fill = copy_of(out), random_block(pages.spec, 7, "cuda")
    others.scatter(fill)
    for _ in range(100):
        wrong = bytearray(payload)
        at = int(rng.integers(0, len(payload)))
        size = min(int(rng.integers(1, 400)), len(payload) - at)
        wrong[at : at + size] = rng.integers(0, 256, size, dtype=np.uint8).tobytes()
        if rng.random() < 0.2:
            del wrong[at:]
        with suppress(CodecError):
            codec.decode(0, [memoryview(wrong)], out)
        out.scatter(fill)
        torch.cuda.synchronize()
        assert bits_of(out.pools) == bits_of(others.pools)


def test_a_large_payload_comes_back(codec):
    """Significands of more than 2^31 bytes, so that no offset fits 32 bits."""
    spec = spec_of((1, 2200, 64, 16, 1024, 64), "bfloat16")
    assert spec.raw_bytes > 1 << 32
    generator = torch.Generator("cuda").manual_seed(3)
    shapes = [(1, 2200, 64, 16, dim) for dim in (1024, 64)]
    block = Block(*(torch.randn(shape, device="cuda", generator=generator, dtype=torch.bfloat16) for shape in shapes))
    (payload,) = codec.encode(PagedBlock.whole(block), on_device=True).stages()
    assert payload.numel() < 0.72 * spec.raw_bytes
    out = Block(*(torch.zeros_like(tensor) for tensor in block.tensors()))
    codec.decode(0, [payload], PagedBlock.whole(out))
    torch.cuda.synchronize()
    assert all(torch.equal(ours, sent) for ours, sent in zip(out.tensors(), block.tensors(), strict=True))


def test_encodings_and_decodings_of_two_streams_do_not_meet(codec):
    blocks = [log_normal(spec_of(SHAPES[0], "bfloat16"), seed=seed) for seed in range(4)]
    streams = [torch.cuda.Stream() for _ in blocks]
    torch.cuda.synchronize()
    encodings = []
    for pages, stream in zip(blocks, streams, strict=True):
        with torch.cuda.stream(stream):
            encodings.append(codec.encode(pages, on_device=True))
    payloads = [encoding.stages()[0] for encoding in encodings]
    for pages, payload in zip(blocks, payloads, strict=True):
        assert payload.cpu().numpy().tobytes() == bytes(codec.encode(on_cpu(pages)).stages()[0])
