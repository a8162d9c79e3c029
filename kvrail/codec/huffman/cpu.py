"""Chunks of a tensor on several threads of a CPU: numba's kernels run without the interpreter's lock."""

import functools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvrail.codec.base import CodecError
from kvrail.codec.huffman.cpu_block_kernels import STREAMS
from kvrail.codec.huffman.cpu_chunk_kernels import (
    count_chunk,
    decode_chunks,
    encode_chunk,
    static_lengths,
    static_tables,
)
from kvrail.codec.huffman.cpu_code_kernels import WINDOW
from kvrail.codec.huffman.format import Format
from kvrail.codec.huffman.payload import Bytes, Layout, chunks_of, digest

_MAX_THREADS = 8
_ALIGNMENT = 64
_LEAST = 4
"""Chunks of a thread: to wake one takes as long as to decode about two."""
_GROUP_BYTES = 1 << 20
"""Of a tensor, decoded by one call: between calls threads wait for the interpreter."""
_KEPT_ROOMS: list["Room"] = []
"""Working memory of the last chunks, for the next: taking it anew from the system costs as much as coding a chunk."""


class Room(NamedTuple):
    """Working memory of one thread."""

    planes: Bytes
    streams: Bytes
    spare: Bytes
    singles: npt.NDArray[np.uint16]
    levels: npt.NDArray[np.uint64]
    codes: npt.NDArray[np.uint64]
    fields: Bytes
    coded: Bytes


def _new_room(word_bytes: int, words: int) -> Room:
    return Room(
        np.empty((word_bytes, words), np.uint8),
        np.empty((STREAMS, 2 * words // STREAMS + 64), np.uint8),
        np.empty((2, words), np.uint8),
        np.empty(WINDOW, np.uint16),
        np.empty(2 * WINDOW, np.uint64),
        np.empty(256, np.uint64),
        np.empty(words + 64, np.uint8),
        np.empty(word_bytes * words, np.uint8),
    )


@contextmanager
def _room(word_bytes: int, words: int) -> Iterator[Room]:
    """Working memory for chunks of up to `words` words of `word_bytes` bytes."""
    try:
        room = _KEPT_ROOMS.pop()
    except IndexError:
        room = _new_room(word_bytes, words)
    if room.planes.shape[0] != word_bytes or room.planes.shape[1] < words:
        room = _new_room(word_bytes, words)
    yield room
    if len(_KEPT_ROOMS) < _MAX_THREADS:
        _KEPT_ROOMS.append(room)


def default_threads() -> int:
    """Threads where nobody says how many: the cores this process may use, eight at most."""
    return min(_MAX_THREADS, len(os.sched_getaffinity(0)))


def fresh(size: int) -> Bytes:
    """Memory for a tensor, uint8 [size], at a multiple of 64 bytes.

    numpy's, for it asks the system for large pages where there is much of it: to take 4 KiB at a time from the system
    lasts longer than decoding into them.
    """
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    return memory[first : first + size]


class _Line:
    """Coded chunks, from several threads in any order, put one behind the other in memory.

    Of the memory only what is written is taken from the system.
    """

    def __init__(self, head_bytes: int, most: int) -> None:
        self._memory = np.empty(head_bytes + most, np.uint8)
        self._end = head_bytes
        self._lock = threading.Lock()
        self._next = 0
        self._waiting: dict[int, Bytes] = {}

    def add(self, chunk: int, coded: Bytes) -> None:
        """Put a chunk, which may be written over after that, where it belongs once all before it are there."""
        ready = []
        with self._lock:
            self._waiting[chunk] = coded if chunk == self._next else coded.copy()
            while self._next in self._waiting:
                part = self._waiting.pop(self._next)
                ready.append((self._end, part))
                self._end += part.size
                self._next += 1
        for start, part in ready:
            self._memory[start : start + part.size] = part

    def complete(self, head: bytes) -> memoryview:
        """All of it, behind `head`."""
        self._memory[: len(head)] = np.frombuffer(head, np.uint8)
        return self._memory[: self._end].data.toreadonly()


def _on_threads(
    threads: int, tasks: range, word_bytes: int, words: int, work: Callable[[int, Room], None], *, least: int = _LEAST
) -> None:
    """Call `work` with each of `tasks` and some thread's room; the first error ends all. least: tasks of a thread."""
    waiting = iter(tasks)

    def run() -> None:
        with _room(word_bytes, words) as room:
            for task in waiting:
                work(task, room)

    others = min(threads, len(tasks) // least) - 1  # this thread is one of them
    pending = [_pool().submit(run) for _ in range(others)]
    try:
        run()
    finally:
        wait(pending)
    for done in pending:
        done.result()


@functools.cache
def _pool() -> ThreadPoolExecutor:
    """Threads beside the caller's, kept: to start one takes as long as to decode ten chunks."""
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has none of its parent's threads
    return ThreadPoolExecutor(_MAX_THREADS - 1, thread_name_prefix="kvrail-huffman")


def _frozen(data: Bytes, word_bytes: int = 1) -> Bytes:
    """The same bytes, aligned for words and read-only, as the kernels are compiled for."""
    view = data.view() if data.ctypes.data % word_bytes == 0 else data.copy()
    view.flags.writeable = False
    return view


def encode(
    format: Format, shape: tuple[int, ...], raw: Bytes, base: Bytes | None, *, static: bool, threads: int
) -> memoryview:
    """Code a tensor's bytes: the whole container, read-only.

    raw, base: uint8, as many. static: one code a plane for all chunks that it suits, at the cost of a pass more.
    """
    raw, taken_off = (_frozen(data, format.word_bytes) for data in (raw, raw[:0] if base is None else base))
    size, chunk_bytes = raw.size, format.word_bytes << format.chunk_bits
    chunks, words = chunks_of(size, chunk_bytes), min(chunk_bytes, max(size, 1)) // format.word_bytes + 1
    item = format.word_bytes
    lengths = np.zeros((item, 256), np.uint8)
    static &= size > 0
    if static:
        _measure(raw, taken_off, format, threads, lengths)
    layout = Layout(
        format,
        shape,
        format.chunk_bits,
        None if base is None else digest(base),
        lengths if static else None,
        np.zeros((chunks, item), np.uint32),
        np.zeros(chunks, np.uint64),
    )
    line = _Line(layout.head_bytes, size)

    def work(chunk: int, room: Room) -> None:
        place = slice(chunk * chunk_bytes, (chunk + 1) * chunk_bytes)
        row = layout.rows[chunk]
        written = encode_chunk(raw[place], taken_off[place], item, format.rotated, lengths, room, row)
        layout.digests[chunk] = digest(room.coded[:written])
        line.add(chunk, room.coded[:written])

    _on_threads(threads, range(chunks), item, words, work)
    return line.complete(layout.head())


def _measure(raw: Bytes, base: Bytes, format: Format, threads: int, lengths: Bytes) -> None:
    """Find the codes that chunks share."""
    chunk_bytes = format.word_bytes << format.chunk_bits
    counts = np.zeros((chunks_of(raw.size, chunk_bytes), format.word_bytes, 256), np.int64)

    def work(chunk: int, room: Room) -> None:
        place = slice(chunk * chunk_bytes, (chunk + 1) * chunk_bytes)
        count_chunk(raw[place], base[place], format.word_bytes, format.rotated, room, counts[chunk])

    words = min(chunk_bytes, max(raw.size, 1)) // format.word_bytes + 1
    _on_threads(threads, range(len(counts)), format.word_bytes, words, work)
    for plane, total in enumerate(counts.sum(axis=0)):
        static_lengths(total, lengths[plane])


def decode(
    layout: Layout, source: Bytes, base: Bytes | None, out: Bytes, *, chunks: range | None = None, threads: int
) -> None:
    """Decode `chunks`, all of them by default, into `out`, uint8, the bytes of these chunks.

    source: the whole container, that `layout` was read from. base: the bytes of the whole base, or None. `out` begins
    where words may. Writes nothing outside it; raises CodecError that names the chunk that is damaged, and then what
    `out` has means nothing.
    """
    chunks = range(len(layout.digests)) if chunks is None else chunks
    singles, levels = _shared_tables(layout)
    ends, item = layout.ends(), layout.format.word_bytes
    source = _frozen(source)
    taken_off = _frozen(source[:0] if base is None else base, layout.format.word_bytes)
    size = layout.chunk_bytes

    group = max(1, min(_GROUP_BYTES // size, len(chunks) // (_LEAST * threads)))

    def work(first: int, room: Room) -> None:
        stop = min(first + group, chunks.stop)
        start = layout.head_bytes + (int(ends[first - 1]) if first else 0)
        coded, places = source[start:], ends[first:stop] - (start - layout.head_bytes)
        for chunk, begin, end in zip(range(first, stop), (0, *places), places, strict=False):
            if digest(coded[begin:end]) != int(layout.digests[chunk]):
                raise CodecError(f"chunk {chunk} of {len(ends)} does not match its checksum: the container is damaged")
        place = slice((first - chunks.start) * size, (stop - chunks.start) * size)
        part = taken_off[first * size : stop * size]
        rows = layout.rows[first:stop]
        wrong = decode_chunks(
            coded, places, rows, singles, levels, part, item, layout.format.rotated, room, out[place], size
        )
        if wrong >= 0:
            raise CodecError(f"chunk {first + wrong} of {len(ends)} does not decode; the encoder is at fault")

    words = min(size, max(out.size, 1)) // item + 1
    least = -(-_LEAST // group)
    _on_threads(threads, range(chunks.start, chunks.stop, group), item, words, work, least=least)


def _shared_tables(layout: Layout) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint64]]:
    """Tables of the codes that chunks share, as decode_chunk takes them. Raises CodecError."""
    planes = layout.format.word_bytes
    columns = 0 if layout.static is None else WINDOW
    singles, levels = np.empty((planes, columns), np.uint16), np.empty((planes, 2 * columns), np.uint64)
    for plane, lengths in enumerate(() if layout.static is None else layout.static):
        if not static_tables(lengths, singles[plane], levels[plane]):
            raise CodecError(f"the shared code of byte plane {plane} is no prefix code: the container is damaged")
    return singles, levels
