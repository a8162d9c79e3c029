"""Chunks of a tensor on several threads of a CPU: numba's kernels run without the interpreter's lock."""

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest as digest

from kvrail.codec.base import CodecError
from kvrail.codec.core.arrays import Bytes
from kvrail.codec.core.cpu import usable_cores
from kvrail.codec.huffman.cpu_block_kernels import STREAMS
from kvrail.codec.huffman.cpu_chunk_kernels import HELD, decode_chunks, encode_chunks
from kvrail.codec.huffman.cpu_code_kernels import WINDOW
from kvrail.codec.huffman.cpu_coded_kernels import RAW
from kvrail.codec.huffman.cpu_digest_kernels import SHORT
from kvrail.codec.huffman.format import Format
from kvrail.codec.huffman.payload import SIZE_BITS, Layout, chunks_of

_MAX_THREADS = 8
_ALIGNMENT = 64
_LEAST = 3
"""Chunks of a thread: to wake one takes as long as to decode one, and longer where cores are busy."""
_PLAIN = 8
"""This many chunks that are only copied, as 8-bit words without a base may be, count as one that is decoded.

They take a sixteenth of its time, but memory bounds them, and two cores get more of that than one."""
_MUCH = 8 << 20
"""Bytes a thread that are too many for its caches: see copied_digest."""
_LIBRARY = ctypes.PyDLL(None)  # whose calls keep the interpreter's lock
_CALL_BYTES = 1 << 26
"""Bytes of a tensor, coded or decoded by one call: between calls Python looks whether it is to stop."""
_KEPT_ROOMS: list["Room"] = []
"""Working memory of the last chunks, for the next: taking more from the system costs as much as coding a chunk."""
_HELPERS: list["_Helper"] = []
_IDLE: list["_Helper"] = []
"""Threads beside the callers', and those that have nothing to do: the one that had last is the first to be asked."""


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
        np.empty((2, words + 8), np.uint8),
        np.empty(WINDOW, np.uint16),
        np.empty(2 * WINDOW, np.uint64),
        np.empty(256, np.uint64),
        np.empty(words + 64, np.uint8),
        np.empty((HELD, word_bytes * words), np.uint8),
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


def _core() -> int:
    """The core that this thread runs on; -1 where the C library does not say."""
    try:
        return int(_LIBRARY.sched_getcpu())
    except AttributeError:
        return -1


def default_threads() -> int:
    """The number of threads where none is given."""
    return usable_cores(_MAX_THREADS)


def fresh(size: int) -> Bytes:
    """Memory for a tensor, uint8 [size], at a multiple of 64 bytes.

    numpy's, for it asks the system for large pages where there is much of it: to take 4 KiB at a time from the system
    lasts longer than decoding into them. Raises CodecError where the system gives no such memory.
    """
    try:
        memory = np.empty(size + _ALIGNMENT, np.uint8)
    except MemoryError:
        raise CodecError(f"decoded it takes {size:,} bytes of memory, more than this machine gives") from None
    first = -memory.__array_interface__["data"][0] % _ALIGNMENT
    return memory[first : first + size]


def _on_threads(threads: int, word_bytes: int, words: int, work: Callable[[Room], bool]) -> None:
    """Call `work` with each thread's room until it says that nothing is left; the first error ends all."""

    def run() -> None:
        with _room(word_bytes, words) as room:
            while work(room):
                pass

    helping = [_Help(run) for _ in range(threads - 1)]  # this thread is one of them
    _ask(helping)
    try:
        run()
    finally:
        errors = [help.error() for help in helping]
    for error in errors:
        if error is not None:
            raise error


class _Help:
    """A call of `run` by another thread, unless that has not woken when its answer is asked for.

    A pool's futures take longer to hand over and to answer, which a tensor of a megabyte feels.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self._taken, self._done = threading.Lock(), threading.Lock()
        self._done.acquire()
        self._error: BaseException | None = None
        self.helper: _Helper | None = None

    def give(self) -> None:
        """Called by the other thread, which then is idle."""
        if self._taken.acquire(blocking=False):
            try:
                self._run()
            except BaseException as error:  # noqa: BLE001 the caller raises it
                self._error = error
            self._leave()
            self._done.release()

    def error(self) -> BaseException | None:
        """What the other thread's call raised; waits for its end where it has begun, and else there will be none."""
        if self._taken.acquire(blocking=False):
            self._leave()
        else:
            self._done.acquire()
        return self._error

    def _leave(self) -> None:
        if self.helper is not None:
            _IDLE.append(self.helper)


class _Helper(threading.Thread):
    """A thread beside the caller's that waits for calls, kept: to start one takes as long as to decode ten chunks.

    While much of a processor is busy, Linux looks for no idle core and wakes a thread on the core of the one that
    wakes it, where it gains nothing, call after call. So a helper may run on all cores but its caller's.
    """

    def __init__(self) -> None:
        super().__init__(name="kvrail-huffman", daemon=True)
        self._calls: SimpleQueue[_Help] = SimpleQueue()
        self._avoided = -1
        self.start()

    def run(self) -> None:
        while True:
            self._calls.get().give()

    def ask(self, help: _Help, core: int) -> None:
        """Have a call made. core: where the caller runs; -1 where that is not known."""
        help.helper = self
        if core != self._avoided and self.native_id is not None:
            self._avoided = core
            with suppress(OSError):  # there is no other core, or a sandbox forbids it
                os.sched_setaffinity(self.native_id, os.sched_getaffinity(0) - {core})
        self._calls.put(help)


def _ask(helping: list[_Help]) -> None:
    """Hand calls to threads that are idle, as many as there are or may be."""
    core = _core() if helping else -1
    for help in helping:
        try:
            helper = _IDLE.pop()
        except IndexError:
            if len(_HELPERS) >= _MAX_THREADS - 1:
                return
            helper = _Helper()
            _HELPERS.append(helper)
        helper.ask(help, core)


def _forget_helpers() -> None:
    """A child has none of its parent's threads."""
    _HELPERS.clear()
    _IDLE.clear()


os.register_at_fork(after_in_child=_forget_helpers)


def _useful(threads: int, chunks: int) -> int:
    """How many of these threads get enough to do with this many chunks to code or decode."""
    return max(1, min(threads, _MAX_THREADS, chunks // _LEAST))


def _frozen(data: Bytes, word_bytes: int = 1) -> Bytes:
    """The same bytes, aligned for words and read-only, as the kernels are compiled for."""
    view = data.view() if word_bytes == 1 or data.ctypes.data % word_bytes == 0 else data.copy()
    view.flags.writeable = False
    return view


_NOTHING = _frozen(np.empty(0, np.uint8))


def encode(format: Format, shape: tuple[int, ...], raw: Bytes, base: Bytes | None, *, threads: int) -> memoryview:
    """Code a tensor's bytes: the whole container, read-only. raw, base: uint8, as many."""
    raw, taken_off = (_frozen(data, format.word_bytes) for data in (raw, _NOTHING if base is None else base))
    size, chunk_bytes = raw.size, format.word_bytes << format.chunk_bits
    chunks, words = chunks_of(size, chunk_bytes), min(chunk_bytes, max(size, 1)) // format.word_bytes + 1
    item = format.word_bytes
    layout = Layout(
        format,
        shape,
        format.chunk_bits,
        None if base is None else digest(base.data),
        np.zeros((chunks, item), np.uint32),
        np.zeros(chunks, np.uint64),
    )
    head_bytes, most = layout.head_bytes, max(1, _CALL_BYTES // chunk_bytes)
    out = np.empty(head_bytes + size, np.uint8)  # the system gives only the pages that are written
    places, numbers = np.full(chunks + 1, -1, np.int64), np.zeros(1, np.int64)
    places[0] = head_bytes
    tensor, index = (raw, taken_off, item, format.rotated), (layout.rows, layout.digests, places, out)

    def work(room: Room) -> bool:
        more: bool = encode_chunks(*tensor, room, chunk_bytes, numbers, most, *index)
        return more

    _on_threads(_useful(threads, chunks), item, words, work)
    for chunk in np.flatnonzero(np.diff(places) <= SHORT):
        layout.digests[chunk] = digest(out[places[chunk] : places[chunk + 1]].data)
    out[:head_bytes] = np.frombuffer(layout.head(), np.uint8)
    return out[: int(places[-1])].data.toreadonly()


def decode(layout: Layout, source: Bytes, base: Bytes | None, out: Bytes, *, threads: int) -> None:
    """Decode all chunks into `out`, uint8, the bytes of the tensor.

    source: the whole container, that `layout` was read from. base: the bytes of the whole base, or None. `out` begins
    where words may. Writes nothing outside it; raises CodecError that names the chunk that is damaged, and then what
    `out` has means nothing.
    """
    chunks, item, size = len(layout.digests), layout.format.word_bytes, layout.chunk_bytes
    taken_off = _NOTHING if base is None else _frozen(base, item)
    ends, sizes, rows, digests = layout.ends, layout.sizes, layout.rows, layout.digests
    coded = _frozen(source[layout.head_bytes :])
    damaged = "chunk {} of {} does not match its checksum: the container is damaged"
    for chunk in (sizes <= SHORT).nonzero()[0]:
        if digest(coded[ends[chunk] - sizes[chunk] : ends[chunk]].data) != digests[chunk]:
            raise CodecError(damaged.format(chunk, chunks))
    useful = _useful(threads, chunks)
    if useful > 1 and item == 1 and base is None:
        none_shrank = len(coded) == out.size  # so no chunk needs to be looked at
        plain = chunks if none_shrank else int(np.count_nonzero(rows >> SIZE_BITS == RAW))
        useful = _useful(threads, chunks - plain + plain // _PLAIN)
    numbers, most, past_caches = np.zeros(1, np.int64), max(1, _CALL_BYTES // size), out.size >= _MUCH * useful
    index = (coded, ends, digests, rows, taken_off, item, layout.format.rotated)

    def work(room: Room) -> bool:
        wrong, more = decode_chunks(*index, room, size, past_caches, numbers, most, out)
        if wrong < 0:
            return bool(more)
        if not more:
            raise CodecError(damaged.format(wrong, chunks))
        raise CodecError(f"chunk {wrong} of {chunks} does not decode; the encoder is at fault")

    _on_threads(useful, item, min(size, max(out.size, 1)) // item + 1, work)
