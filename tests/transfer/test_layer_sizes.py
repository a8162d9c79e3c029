"""How pages are cut into frames, and how long a frame can get."""

import pytest
import torch

from kvrail.codec import registry
from kvrail.codec.base import Block, BlockSpec, PagedBlock
from kvrail.transfer.pieces import Piece, cut
from kvrail.transfer.sizes import (
    FRAME_S,
    LEAST_FRAME_BYTES,
    MAX_GROWTH_BYTES,
    RECENT_TOKENS,
    STAGED_FRAME_S,
    USUAL_FRAME_BYTES,
    block_spec,
    first_recent_page,
    frame_bytes,
    max_payload_bytes,
    pages_per_frame,
)
from kvrail.values.layout import KVLayout

SHAPES = ((1, 1, 64, 2, 64), (3, 5, 7, 3, 5), (1, 2, 1, 1, 1), (2, 1, 500, 1, 24))


def random_bits(spec):
    """KV that no code makes smaller."""
    generator = torch.Generator().manual_seed(0)

    def tensor(*shape, dtype):
        size = torch.empty((), dtype=dtype).element_size()
        raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), generator=generator, dtype=torch.uint8)
        return raw.view(dtype)

    lead, dtype = (spec.num_layers, spec.num_pages, spec.page_size, spec.num_kv_heads), getattr(torch, spec.dtype)
    scales = [tensor(*lead, dtype=torch.float32) if spec.scaled else None for _ in range(2)]
    return Block(tensor(*lead, spec.key_dim, dtype=dtype), tensor(*lead, spec.value_dim, dtype=dtype), *scales)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("name", "dtype"), [(name, dtype) for name in registry.names() for dtype in sorted(registry.get(name).dtypes)]
)
def test_no_payload_outgrows_its_bound(name, dtype, shape):
    layers, pages, page_size, heads, dim = shape
    spec = BlockSpec(dtype, layers, pages, page_size, heads, dim, dim + 3, "float8" in dtype)
    codec = registry.get(name)
    payloads = codec.encode(PagedBlock.whole(random_bits(spec))).stages()
    assert all(payload.nbytes <= max_payload_bytes(spec) for payload in payloads)
    assert max_payload_bytes(spec) == spec.raw_bytes + MAX_GROWTH_BYTES


def test_a_layouts_pages_as_one_block():
    layout = KVLayout(6, 2, 16, 24, 64, "float8_e5m2")
    assert block_spec(layout, 3).raw_bytes == 3 * layout.page_bytes


def test_frames_hold_what_the_link_takes_in_a_moment_within_bounds():
    most = 16 << 20
    assert frame_bytes(0, most, 1) == USUAL_FRAME_BYTES
    assert frame_bytes(1_000, most, 1) == LEAST_FRAME_BYTES
    assert frame_bytes(100_000_000, most, 1) == round(FRAME_S * 100_000_000)
    assert frame_bytes(1 << 40, most, 1) == frame_bytes(1 << 40, 2 * most, 1) == most
    assert frame_bytes(100_000_000, most, 2) == 2 * round(FRAME_S * 100_000_000)
    assert frame_bytes(1_250_000_000, 4 * most, 2) == 2 * frame_bytes(1_250_000_000, 4 * most, 1) == 2 * most
    assert frame_bytes(3_000_000_000, 4 * most, 2) == round(STAGED_FRAME_S * 3_000_000_000) > 3 * most
    assert frame_bytes(3_000_000_000, 4 * most, 1) == most
    assert frame_bytes(1 << 40, most, 3) == most
    assert frame_bytes(0, 1000, 1) == frame_bytes(1, 1000, 1) == frame_bytes(1 << 40, 1000, 1) == 1000
    assert pages_per_frame(KVLayout(6, 2, 16, 16, 64, "bfloat16"), 1) == 1


@pytest.mark.parametrize("border", [0, 2, 5, 8])
@pytest.mark.parametrize("held", [0, 3])
@pytest.mark.parametrize("frame_pages", [1, 2, 5, 7, 8, 30, 100])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2"])
def test_pieces_cover_everything_once_and_fit_into_a_frame(dtype, frame_pages, held, border):
    layout = KVLayout(6, 2, 16, 16, 64, dtype)
    unit = layout.page_bytes // layout.num_layers
    max_frame_bytes = frame_pages * unit + unit // 2
    assert pages_per_frame(layout, max_frame_bytes) == frame_pages
    assert pages_per_frame(layout, frame_pages * unit) == frame_pages  # not one less for what a payload may grow
    waiting = [Piece(layer, layer + 1, 0, 7, None) for layer in range(6)] + [Piece(0, 6, 7, 9, None)]
    seen = []
    for piece in cut(waiting, held, frame_pages, border):
        cells = [
            (layer, page)
            for layer in range(piece.first_layer, piece.end_layer)
            for page in range(piece.first_page, piece.end_page)
        ]
        assert 0 < len(cells) <= frame_pages
        assert not piece.first_page < border < piece.end_page
        seen += cells
    assert sorted(seen) == [(layer, page) for layer in range(6) for page in range(held, 9)]
    assert len(seen) == len(set(seen))


@pytest.mark.parametrize("page_size", [1, 5, 16, 64])
def test_recent_pages_are_those_that_hold_the_last_tokens(page_size):
    for num_tokens in range(1, 200):
        expected = {token // page_size for token in range(num_tokens)[-RECENT_TOKENS:]}
        assert first_recent_page(num_tokens, page_size) == min(expected)


@pytest.mark.parametrize("layers_per_frame", [1, 2, 3])
def test_layers_that_are_still_computed_wait_for_no_more_than_their_frame(layers_per_frame):
    """On a GPU the host runs ahead: all layers are queued before the first is done. None may wait for the last."""
    events = [f"layer {layer} is done" for layer in range(6)]
    waiting = [Piece(layer, layer + 1, 0, 7, events[layer]) for layer in range(6)]
    found = list(cut(waiting, 0, 7 * layers_per_frame))
    assert [piece.end_layer - piece.first_layer for piece in found] == [layers_per_frame] * (6 // layers_per_frame)
    assert [piece.ready for piece in found] == [events[piece.end_layer - 1] for piece in found]
