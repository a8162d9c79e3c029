"""How much one KV frame may hold, and which pages travel whole; both ends of a transfer reckon alike."""

from codec.base import BlockSpec
from codec.frame import MAX_HEADER_BYTES
from kvrail.layout import KVLayout
from kvrail.transport.base import Expectation

MAX_GROWTH_BYTES = 1024
"""A payload has at most this many bytes more than its KV: codecs send as it is what they cannot make smaller, with a
header and padding."""

RECENT_TOKENS = 16
"""Of a prompt's end: the pages that hold them travel with all their stages at once, so that drafts see them exactly
(docs/decisions/0006-anchor.md), and no later stage is written into a page that drafts write."""


def pages_per_frame(layout: KVLayout, max_frame_bytes: int) -> int:
    """Pages of one layer whose KV fits into one frame; at least 1 where a page of a layer fits (checked at start)."""
    return max_frame_bytes * layout.num_layers // layout.page_bytes


def first_recent_page(num_tokens: int, page_size: int) -> int:
    """Logical number of the first page that holds one of the last RECENT_TOKENS tokens of a prompt."""
    return max(0, num_tokens - RECENT_TOKENS) // page_size


def max_payload_bytes(max_frame_bytes: int) -> int:
    """The longest payload of a frame that holds `max_frame_bytes` of KV."""
    return max_frame_bytes + MAX_GROWTH_BYTES


def expectation(request_id: str, missing: BlockSpec, num_stages: int, max_frame_bytes: int) -> Expectation:
    """Bounds of a transfer that brings `missing` in `num_stages` stages; a frame has at least one page of one layer."""
    frames = missing.num_layers * missing.num_pages
    around = MAX_HEADER_BYTES + MAX_GROWTH_BYTES
    return Expectation(
        request_id,
        max_frame_bytes=max_frame_bytes + around,
        max_total_bytes=num_stages * (missing.raw_bytes + frames * around),
    )
