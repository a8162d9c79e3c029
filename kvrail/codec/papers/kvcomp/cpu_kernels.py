"""Symbols to Huffman streams and back, a page at a time, compiled by numba; the bits: README.md beside this.

Pages are counted layer by layer. symbols: uint8 [pages, page_size, heads * dim]; lengths: uint16 [pages, heads,
page_size], bits of each vector; ends: uint32 [pages, heads], words at which each block ends in the stream, uint32.
"""

# Numba gives arguments their types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from numba import int64, types, uint8, uint16, uint32, uint64, void

from kvrail.codec.core.cpu_compile import compiled

_SYMBOLS, _LENGTHS, _ENDS = uint8[:, :, ::1], uint16[:, :, ::1], uint32[:, ::1]
_RANGE = (int64, int64, int64)
_READ_ONLY = types.Array(uint16, 3, "C", readonly=True), types.Array(uint32, 2, "C", readonly=True)


@compiled(void(_SYMBOLS, *_RANGE, uint8[:, ::1], _LENGTHS))
def measure_pages(symbols, first, last, layer_pages, bits, lengths):
    """Write the lengths of the vectors of pages `first` to `last`; bits: code lengths, uint8 [layers, symbols]."""
    heads, rows = lengths.shape[1:]
    dim = symbols.shape[2] // heads
    for page in range(first, last):
        of = bits[page // layer_pages]
        for row in range(rows):
            for head in range(heads):
                total = 0
                for column in range(head * dim, head * dim + dim):
                    total += of[symbols[page, row, column]]
                lengths[page, head, row] = total


@compiled(void(_SYMBOLS, *_RANGE, uint8[:, ::1], uint16[:, ::1], _ENDS, uint32[::1]))
def write_pages(symbols, first, last, layer_pages, bits, codes, ends, stream):
    """Write the blocks of pages `first` to `last` where `ends` says; codes: uint16 [layers, symbols]."""
    heads = ends.shape[1]
    rows, dim = symbols.shape[1], symbols.shape[2] // heads
    before = ends.size and first > 0
    at = int64(ends[first - 1, heads - 1]) if before else 0
    for page in range(first, last):
        layer = page // layer_pages
        for head in range(heads):
            held, filled = uint64(0), uint64(0)
            for row in range(rows):
                for column in range(head * dim, head * dim + dim):
                    symbol = symbols[page, row, column]
                    held |= uint64(codes[layer, symbol]) << filled
                    filled += uint64(bits[layer, symbol])
                    if filled >= uint64(32):
                        stream[at] = uint32(held & uint64(0xFFFFFFFF))
                        at += 1
                        held >>= uint64(32)
                        filled -= uint64(32)
            if filled:
                stream[at] = uint32(held)
                at += 1


@compiled(int64(uint32[::1], *_RANGE, uint16[:, ::1], *_READ_ONLY, _SYMBOLS))
def read_pages(stream, first, last, layer_pages, tables, lengths, ends, symbols):
    """Decode pages `first` to `last` into `symbols`; how many vectors or blocks do not end where they should.

    stream: the words, and one of zeros. tables: codebook.decoding_table by layer. lengths and ends were checked: they
    add up to the stream's words.
    """
    heads, rows = lengths.shape[1:]
    dim, wrong, words = symbols.shape[2] // heads, 0, stream.size - 1
    at = int64(ends[first - 1, heads - 1]) if first > 0 else 0
    for page in range(first, last):
        table = tables[page // layer_pages]
        for head in range(heads):
            bit = at * 32
            at = int64(ends[page, head])
            for row in range(rows):
                end = bit + lengths[page, head, row]
                for column in range(head * dim, head * dim + dim):
                    word = min(bit >> 5, words - 1)  # where codes run on past the end, any word will do
                    pair = uint64(stream[word]) | uint64(stream[word + 1]) << uint64(32)
                    entry = table[(pair >> uint64(bit & 31)) & uint64(4095)]
                    symbols[page, row, column] = entry >> 4
                    bit += entry & 15
                    wrong += entry == 0
                wrong += bit != end
                bit = end
            if bit & 31:
                wrong += (stream[bit >> 5] >> uint32(bit & 31)) != 0
    return wrong
