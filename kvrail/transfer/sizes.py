"""How much one KV frame may hold, and which pages travel whole; both ends of a transfer compute the same."""

from kvrail.codec.base import BlockSpec
from kvrail.values.layout import KVLayout

MAX_GROWTH_BYTES = 1024
"""A payload has at most this many bytes more than its KV: codecs send as it is what they cannot make smaller, with a
header and padding."""

FRAME_S = 0.035
"""The link is to take about this long for a frame's KV. More urgent frames wait for those on their way; but each
frame has a cost of its own, and at 10 Gb/s frames of 4 MiB left part of the link unused (docs/decisions/0009)."""
LEAST_FRAME_BYTES, MOST_FRAME_BYTES = 256 << 10, 16 << 20
STAGED_FRAME_S = 0.02
"""At least this long if a codec has several stages: each travels by itself, the first is about a third of the KV, and
the calls that a block's encoding costs the host do not depend on what it holds (docs/decisions/0009)."""
MOST_DIRECT_FRAME_BYTES = 64 << 20
"""Most of a frame from GPU to GPU, where large ones lose least around each; one of 64 MiB takes NVLink 0.2 ms."""
USUAL_FRAME_BYTES = 4 << 20
"""A frame's KV while the link is not measured."""

RECENT_TOKENS = 16
"""A prompt's last tokens. The pages that hold them travel with all their stages at once, so drafts see them exactly
(docs/decisions/0006-anchor.md), and no later stage is written into a page that drafts write."""


def frame_bytes(link_bytes_per_s: int, max_frame_bytes: int, num_stages: int) -> int:
    """KV that is encoded at once, uncompressed, for a link of that rate; 0: it is not known.

    Each of a codec's stages travels in a frame of its own, so the more there are, the more goes into one encoding.
    """
    wanted = min(max(round(FRAME_S * link_bytes_per_s), LEAST_FRAME_BYTES), MOST_FRAME_BYTES)
    block = (wanted if link_bytes_per_s else USUAL_FRAME_BYTES) * num_stages
    if num_stages > 1:
        block = max(block, round(STAGED_FRAME_S * link_bytes_per_s))
    return min(block, max_frame_bytes)


def pages_per_frame(layout: KVLayout, frame_bytes: int) -> int:
    """Pages of one layer whose KV fits into `frame_bytes`, at least 1."""
    return max(1, frame_bytes * layout.num_layers // layout.page_bytes)


def first_recent_page(num_tokens: int, page_size: int) -> int:
    """Logical number of the first page that holds one of the last RECENT_TOKENS tokens of a prompt."""
    return max(0, num_tokens - RECENT_TOKENS) // page_size


def max_payload_bytes(spec: BlockSpec) -> int:
    """The longest payload that a stage of a block can have."""
    return spec.raw_bytes + MAX_GROWTH_BYTES


def block_spec(layout: KVLayout, num_pages: int, *, num_layers: int | None = None) -> BlockSpec:
    """Shape of `num_pages` pages as one block; num_layers: of some layers instead of all."""
    return BlockSpec(
        dtype=layout.dtype,
        num_layers=layout.num_layers if num_layers is None else num_layers,
        num_pages=num_pages,
        page_size=layout.page_size,
        num_kv_heads=layout.num_kv_heads,
        key_dim=layout.key_dim,
        value_dim=layout.value_dim,
        scaled=layout.scaled,
    )
