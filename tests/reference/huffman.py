"""The container in plain Python, a byte at a time: what the kernels must equal, bit for bit.

It reads any container; what it writes is what the encoder writes. Checksums are checked by payload.py alone.
"""

import heapq
import math
from collections import Counter
from collections.abc import Iterator

from kvrail.codec.huffman.format import Format

MAX_BITS, STREAMS = 12, 6
RAW, CONSTANT, HUFFMAN, SPARSE, FIELDS = 0, 1, 2, 4, 5
LEAST_SAVING = 32
LINE, SAMPLED, SAMPLE_LEAST = 64, 5, 1 << 14
MOST_SHIFT, DEAREST, NOTHING, ENOUGH = 1, 300, 2000, 5
SURPRISE = 64


def planes_of(raw: bytes, base: bytes, format: Format) -> list[bytes]:
    """A chunk's bytes, plane by plane, the lowest first."""
    size = format.word_bytes
    if base:
        raw = bytes(a ^ b for a, b in zip(raw, base, strict=True))
    words = [int.from_bytes(raw[at : at + size], "little") for at in range(0, len(raw), size)]
    if format.rotated:
        words = [(word << 1 | word >> (8 * size - 1)) & ((1 << 8 * size) - 1) for word in words]
    return [bytes(word >> (8 * plane) & 255 for word in words) for plane in range(size)]


def chunk_of(planes: list[bytes], base: bytes, format: Format) -> bytes:
    """The inverse of `planes_of`."""
    size = format.word_bytes
    words = [sum(byte << (8 * place) for place, byte in enumerate(column)) for column in zip(*planes, strict=True)]
    if format.rotated:
        words = [word >> 1 | (word & 1) << (8 * size - 1) for word in words]
    raw = b"".join(word.to_bytes(size, "little") for word in words)
    return bytes(a ^ b for a, b in zip(raw, base, strict=True)) if base else raw


def lengths_of(counts: dict[int, int]) -> dict[int, int]:
    """Optimal code lengths of at most MAX_BITS bits: package-merge on lists of (weight, symbols within)."""
    coins = sorted((count, symbol) for symbol, count in counts.items() if count)
    if len(coins) == 1:
        return {coins[0][1]: 1}
    level: list[tuple[int, int, list[int]]] = []
    for _ in range(MAX_BITS):
        pairs = zip(level[0::2], level[1::2], strict=False)
        packages = [(first[0] + second[0], 1, first[2] + second[2]) for first, second in pairs]
        # Coins before packages of equal weight, each kind in its own order.
        level = sorted([*((weight, 0, [symbol]) for weight, symbol in coins), *packages], key=lambda item: item[:2])
    lengths = dict.fromkeys((symbol for _, symbol in coins), 0)
    for _, _, symbols in level[: 2 * len(coins) - 2]:
        for symbol in symbols:
            lengths[symbol] += 1
    return lengths


def codes_of(lengths: dict[int, int]) -> dict[str, int]:
    """Symbols by their canonical codes, written as strings of 0 and 1, the first bit first."""
    codes, code, bits = {}, 0, 0
    for symbol in sorted(lengths, key=lambda symbol: (lengths[symbol], symbol)):
        code <<= lengths[symbol] - bits
        bits = lengths[symbol]
        codes[f"{code:0{bits}b}"] = symbol
        code += 1
    return codes


def segments_of(size: int) -> Iterator[tuple[int, int]]:
    """First and last symbol of each stream."""
    segment = -(-size // STREAMS)
    for stream in range(STREAMS):
        yield min(stream * segment, size), min((stream + 1) * segment, size)


def _entropy_bits(counts: dict[int, int]) -> float:
    size = sum(counts.values())
    return -sum(count * math.log2(count / size) for count in counts.values() if count)


def _counted(block: bytes) -> dict[int, int]:
    return {symbol: block.count(symbol) for symbol in set(block)}


def encode_block(block: bytes) -> tuple[int, bytes]:
    """Mode and bytes of a block with a code of its own, or as it is."""
    counts, most = _counted(block), len(block) - len(block) // LEAST_SAVING
    if _entropy_bits(counts) > 8 * most:
        return RAW, block
    if len(counts) == 1:
        return CONSTANT, block[:1]
    lengths = lengths_of(counts)
    table = _table(lengths)
    bits = sum(counts[symbol] * lengths[symbol] for symbol in counts)
    if len(table) + 4 * (STREAMS - 1) + bits // 8 + STREAMS > most:
        return RAW, block
    return HUFFMAN, _coded(block, lengths)


def _coded(block: bytes, lengths: dict[int, int]) -> bytes:
    """Table, ends and streams."""
    codes = {symbol: code for code, symbol in codes_of(lengths).items()}
    streams = []
    for start, stop in segments_of(len(block)):
        text = "".join(codes[symbol] for symbol in block[start:stop])
        streams.append(bytes(int(text[at : at + 8][::-1], 2) for at in range(0, len(text), 8)))
    ends = [sum(map(len, streams[: stream + 1])) for stream in range(STREAMS - 1)]
    return _table(lengths) + b"".join(end.to_bytes(4, "little") for end in ends) + b"".join(streams)


def _table(lengths: dict[int, int]) -> bytes:
    first, last = min(lengths), max(lengths)
    nibbles = [lengths.get(symbol, 0) for symbol in range(first, last + 1)] + [0]
    pairs = zip(nibbles[0:-1:2], nibbles[1::2], strict=False)
    return bytes([first, last]) + bytes(low | high << 4 for low, high in pairs)


def sample_of(plane: bytes) -> bytes:
    """Every SAMPLED-th whole line of a plane."""
    whole = len(plane) // LINE * LINE
    return b"".join(plane[at : at + LINE] for at in range(0, whole, LINE * SAMPLED))


def _code_bits(counts: dict[int, int]) -> int:
    """Bits of a sample in an optimal code, without a limit to its lengths, and what the sample makes them too few."""
    heap, bits = sorted(counts.values()), 0
    while len(heap) > 1:
        weight = heapq.heappop(heap) + heapq.heappop(heap)
        bits += weight
        heapq.heappush(heap, weight)
    return bits + 3 * max(len(counts) - 1, 0) // 4


def rest_of(byte: int, shift: int, bits: int) -> int:
    """A byte without the field of `bits` bits from bit `shift` on."""
    return byte >> (shift + bits) << shift | byte & ((1 << shift) - 1)


def choose_field(sample: bytes) -> tuple[int, int]:
    """Lowest bit and bits of the field that a plane is cut at; 0 bits where it is not."""
    plain, best = _code_bits(_counted(sample)), (0, 0)
    for shift in range(MOST_SHIFT + 1):
        left = plain
        for bits in range(1, 8 - shift + 1):
            was, left = left, _code_bits(_counted(bytes(rest_of(byte, shift, bits) for byte in sample)))
            loss = left + bits * len(sample) - plain
            if loss > plain * bits // DEAREST or (loss > plain // NOTHING and was <= ENOUGH * len(sample)):
                break
            if bits > best[1]:
                best = (shift, bits)
    return best


def _parts_of(bits: int, size: int) -> Iterator[tuple[int, int, int]]:
    """For each part of a field: its lowest bit in the field, its bits, and the bytes it takes."""
    done = 0
    for part in (4, 2, 1):
        if bits & part:
            yield done, part, -(-part * size // 64) * 8
            done += part


def _possible(block: bytes, values: int) -> list[int]:
    """Values from the first to the last that occurs, in the lower half of `values` and in the upper."""
    found: list[int] = []
    for half in (range(values // 2), range(values // 2, values)):
        seen = [value for value in half if value in set(block)]
        found += range(seen[0], seen[-1] + 1) if seen else ()
    return found


def _encode_rest(block: bytes, sample: dict[int, int], values: int) -> tuple[int, bytes]:
    """Mode and bytes of a block of values below `values` whose code is made for a sample, where that suits."""
    possible = _possible(block, values)
    unseen = [value for value in possible if value not in sample]
    if 4 * len(unseen) <= len(possible) and len(possible) > 1:
        counts = sample | {value: sample.get(value, 0) + 1 for value in possible}
        lengths = lengths_of(counts)
        bits = sum(counts[value] * lengths[value] for value in counts)
        expected, coded = bits * len(block) // (8 * sum(counts.values())), _coded(block, lengths)
        if len(coded) <= expected + expected // SURPRISE + SURPRISE:
            return HUFFMAN, coded
    return encode_block(block)


def _encode_sampled(plane: bytes, sample: bytes) -> tuple[int, bytes]:
    shift, bits = choose_field(sample)
    fields = b""
    for low, part, step in _parts_of(bits, len(plane)):
        packed = [0] * step
        for at, byte in enumerate(plane):
            packed[at % step] |= (byte >> (shift + low) & ((1 << part) - 1)) << part * (at // step)
        fields += bytes(packed)
    rest = bytes(rest_of(byte, shift, bits) for byte in plane)
    seen = Counter(rest_of(byte, shift, bits) for byte in sample)
    mode, coded = _encode_rest(rest, dict(seen), 256 >> bits)
    return (FIELDS, bytes([shift, bits, mode]) + bytes(5) + fields + coded) if bits else (mode, coded)


def _decode_fields(coded: bytes, size: int) -> bytes:
    shift, bits, at = coded[0], coded[1], 8
    whole = [0] * size
    for low, part, step in _parts_of(bits, size):
        for place in range(size):
            field = coded[at + place % step] >> part * (place // step) & ((1 << part) - 1)
            whole[place] |= field << (shift + low)
        at += step
    for place, rest in enumerate(decode_plane(coded[2], coded[at:], size)):
        whole[place] |= rest >> shift << (shift + bits) | rest & ((1 << shift) - 1)
    return bytes(whole)


def encode_plane(plane: bytes) -> tuple[int, bytes]:
    """Mode and bytes of a plane where chunks share no codes."""
    if len(plane) >= SAMPLE_LEAST:
        sample = sample_of(plane)
        seen = _counted(sample)
        if _entropy_bits(seen) > 8 * (len(sample) - len(sample) // LEAST_SAVING):
            return RAW, plane
        if max(seen.values()) < 0.6 * len(sample):
            mode, coded = _encode_sampled(plane, sample)
            if len(coded) <= len(plane) - len(plane) // LEAST_SAVING:
                return mode, coded
    counts = _counted(plane)
    commonest = min(counts, key=lambda symbol: (-counts[symbol], symbol))
    if len(plane) >= 256 and 0.6 <= counts[commonest] / len(plane) < 1:
        lengths = lengths_of(counts)
        if _entropy_bits(counts) < 0.97 * sum(counts[symbol] * lengths[symbol] for symbol in counts):
            marks = [symbol != commonest for symbol in plane] + [False] * (-len(plane) % 8)
            packed = bytes(sum(marks[at + bit] << bit for bit in range(8)) for at in range(0, len(marks), 8))
            rest = bytes(symbol for symbol in plane if symbol != commonest)
            mark_mode, mark_block = encode_block(packed)
            rest_mode, rest_block = encode_block(rest)
            numbers = len(rest).to_bytes(4, "little") + len(mark_block).to_bytes(4, "little")
            sparse = bytes([commonest, mark_mode, rest_mode, 0]) + numbers + mark_block + rest_block
            if 12 + len(mark_block) + len(rest) <= len(plane) and len(sparse) < len(plane):
                return SPARSE, sparse
    return encode_block(plane)


def decode_plane(mode: int, coded: bytes, size: int) -> bytes:
    """`size` bytes of a plane or block."""
    if mode == RAW:
        return coded
    if mode == CONSTANT:
        return coded * size
    if mode == SPARSE:
        found, mark_size = int.from_bytes(coded[4:8], "little"), int.from_bytes(coded[8:12], "little")
        marks = decode_plane(coded[1], coded[12 : 12 + mark_size], -(-size // 8))
        rest = iter(decode_plane(coded[2], coded[12 + mark_size :], found))
        return bytes(next(rest) if marks[at // 8] >> (at % 8) & 1 else coded[0] for at in range(size))
    if mode == FIELDS:
        return _decode_fields(coded, size)
    first, last = coded[0], coded[1]
    table, coded = coded[2 : 2 + (last - first + 2) // 2], coded[2 + (last - first + 2) // 2 :]
    lengths = {
        symbol: table[(symbol - first) // 2] >> 4 * ((symbol - first) % 2) & 15 for symbol in range(first, last + 1)
    }
    lengths = {symbol: bits for symbol, bits in lengths.items() if bits}
    codes = codes_of(lengths)
    head = 4 * (STREAMS - 1)
    streams = coded[head:]
    ends = [0, *(int.from_bytes(coded[at : at + 4], "little") for at in range(0, head, 4)), len(streams)]
    out = bytearray()
    for stream, (start, stop) in enumerate(segments_of(size)):
        text = "".join(f"{byte:08b}"[::-1] for byte in streams[ends[stream] : ends[stream + 1]])
        at = 0
        for _ in range(start, stop):
            bits = next(bits for bits in range(1, MAX_BITS + 1) if text[at : at + bits] in codes)
            out.append(codes[text[at : at + bits]])
            at += bits
    return bytes(out)
