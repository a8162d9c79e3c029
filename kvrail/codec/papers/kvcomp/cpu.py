"""Symbols in host memory to a layer's Huffman codes, and back: ranges of pages on several threads."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvrail.codec.base import CodecError
from kvrail.codec.core.arrays import Bytes
from kvrail.codec.core.cpu import on_threads
from kvrail.codec.core.sections import StreamPart
from kvrail.codec.papers.kvcomp.codebook import codes_of, decoding_table, lengths_of, packed_lengths
from kvrail.codec.papers.kvcomp.cpu_kernels import measure_pages, read_pages, write_pages
from kvrail.codec.papers.kvcomp.payload import tables_of
from kvrail.codec.papers.kvcomp.plan import TensorPlan


@dataclass(frozen=True, slots=True)
class Coded:
    """A tensor's code lengths, bytes [layers, table_bytes]; its vectors' bits, its blocks' ends, and its stream."""

    tables: bytes
    lengths: npt.NDArray[np.uint16]
    ends: npt.NDArray[np.uint32]
    stream: npt.NDArray[np.uint32]


def code(symbols: Bytes, plan: TensorPlan) -> Coded:
    """Code symbols, uint8 [values] in the order of the tensor's elements, with the best code of each layer."""
    by_layer = symbols.reshape(plan.num_layers, -1)
    counts = [np.bincount(layer, minlength=plan.code.symbols).tolist() for layer in by_layer]
    tables = [lengths_of(each) for each in counts]
    bits = np.array(tables, dtype=np.uint8)
    codes = np.array([codes_of(each) for each in tables], dtype=np.uint16)
    pages = symbols.reshape(plan.pages, plan.rows, -1)
    lengths = np.empty((plan.pages, plan.heads, plan.rows), dtype=np.uint16)
    layer_pages = plan.num_pages
    on_threads(
        lambda first, last: measure_pages(pages, first, last, layer_pages, bits, lengths), plan.pages, plan.raw_bytes
    )
    ends = np.cumsum((lengths.sum(axis=2, dtype=np.int64) + 31) // 32)
    blocks = ends.astype(np.uint32).reshape(plan.pages, plan.heads)
    stream = np.empty(int(ends[-1]), dtype=np.uint32)
    on_threads(
        lambda first, last: write_pages(pages, first, last, layer_pages, bits, codes, blocks, stream),
        plan.pages,
        plan.raw_bytes,
    )
    return Coded(b"".join(map(packed_lengths, tables)), lengths, blocks, stream)


def symbols_of(fixed: Bytes, stream: Bytes, part: StreamPart, out: Bytes) -> None:
    """The inverse, into uint8 [values]; fixed: the tensor's fixed sections, checked; stream: the payload from there on.

    Raises CodecError where the stream's codes do not end where the vectors do.
    """
    plan = part.plan
    words = np.zeros(part.words + 1, dtype=np.uint32)
    words[:-1] = stream[: 4 * part.words].view("<u4")
    tables = np.stack([decoding_table(each) for each in tables_of(fixed, plan)])
    # Copies, for sections of a payload may lie at any address.
    lengths = plan.sections["lengths"].of(fixed).copy().view("<u2").reshape(plan.pages, plan.heads, plan.rows)
    ends = plan.sections["ends"].of(fixed).copy().view("<u4").reshape(plan.pages, plan.heads)
    pages = out.reshape(plan.pages, plan.rows, -1)
    wrong = on_threads(
        lambda first, last: read_pages(words, first, last, plan.num_pages, tables, lengths, ends, pages),
        plan.pages,
        plan.raw_bytes,
    )
    if sum(wrong):
        raise CodecError(f"{sum(wrong)} vectors of a payload do not end where their lengths say")
