"""XXH3-64 of more than 240 bytes, for kernels on a CPU: what `payload.digest` gives, without the interpreter.

Eight sums of 64 bits take in a stripe of 64 bytes at a time, each with eight bytes of a secret that moves on by eight
bytes a stripe; after 16 stripes, a block, they are scrambled (the xxHash specification, version 0.2.0, XXH3 for large
inputs).
"""

# Numba gives arguments their types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, arg-type, call-arg"

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, uint64, void
from numba import uint64 as u64

from kvrail.codec.core.cpu_compile import instruction
from kvrail.codec.huffman.cpu_word_kernels import copy_memory, load_word

SHORT = 240
"""Bytes up to which XXH3 is another function."""
_STRIPE, _BLOCK, _STRIPES = 64, 1024, 16
_WIDTH = 16
"""Bytes of the stores that go past the caches, and what their addresses are multiples of."""
_SECRET = np.frombuffer(
    bytes.fromhex(
        "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
        "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
        "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
        "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
    ),
    np.uint8,
)
_SCRAMBLING, _LAST, _MERGING = 128, 121, 11
"""Where in the secret lies what scrambles a block, goes with the last stripe, and merges the sums."""
_PRIME = 0x9E3779B1
_SUMS = np.array(
    [
        0xC2B2AE3D,
        0x9E3779B185EBCA87,
        0xC2B2AE3D27D4EB4F,
        0x165667B19E3779F9,
        0x85EBCA77C2B2AE63,
        0x85EBCA77,
        0x27D4EB2F165667C5,
        0x9E3779B1,
    ],
    np.uint64,
)
_EIGHT = ir.VectorType(ir.IntType(64), 8)


def _all(number: int) -> Any:
    return ir.Constant(_EIGHT, [ir.Constant(ir.IntType(64), number)] * 8)


def _eight(builder: Any, address: Any, offset: int) -> Any:
    """Where eight words lie, `offset` bytes behind an address."""
    return builder.inttoptr(builder.add(address, ir.Constant(ir.IntType(64), offset)), ir.PointerType(_EIGHT))


def _take_in(builder: Any, sums: Any, words: Any, secret: Any, stripe: int) -> Any:
    """The sums with one more stripe: its words cross over in pairs, and the halves of the keyed ones are multiplied."""
    keyed = builder.xor(words, builder.load(_eight(builder, secret, 8 * stripe), align=1))
    product = builder.mul(builder.and_(keyed, _all(0xFFFFFFFF)), builder.lshr(keyed, _all(32)))
    crossed = ir.Constant(ir.VectorType(ir.IntType(32), 8), [ir.Constant(ir.IntType(32), i ^ 1) for i in range(8)])
    return builder.add(builder.add(sums, builder.shuffle_vector(words, words, crossed)), product)


def _store_past_caches(builder: Any, words: Any, target: Any, offset: int) -> None:
    """Store eight words `offset` bytes behind `target`, a multiple of _WIDTH, without reading what was there."""
    for part in range(0, 8, 2):
        pair = builder.shuffle_vector(words, words, ir.Constant(ir.VectorType(ir.IntType(32), 2), [part, part + 1]))
        place = builder.add(target, ir.Constant(ir.IntType(64), offset + 8 * part))
        store = builder.store(pair, builder.inttoptr(place, ir.PointerType(pair.type)), align=_WIDTH)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))


def _take_in_block(
    builder: Any, sums: Any, data: Any, secret: Any, target: Any = None, *, past_caches: bool = False
) -> None:
    """Take in the block at `data`, and scramble; what is loaded is stored at `target`, where there is one."""
    found = builder.load(_eight(builder, sums, 0), align=1)
    for stripe in range(_STRIPES):
        words = builder.load(_eight(builder, data, _STRIPE * stripe), align=1)
        if past_caches:
            _store_past_caches(builder, words, target, _STRIPE * stripe)
        elif target is not None:
            builder.store(words, _eight(builder, target, _STRIPE * stripe), align=1)
        found = _take_in(builder, found, words, secret, stripe)
    found = builder.xor(found, builder.lshr(found, _all(47)))
    found = builder.xor(found, builder.load(_eight(builder, secret, _SCRAMBLING), align=1))
    builder.store(builder.mul(found, _all(_PRIME)), _eight(builder, sums, 0), align=1)


@instruction(void(uint64, uint64, uint64))
def _add_block(builder: Any, sums: Any, data: Any, secret: Any) -> None:
    """Take in the block at `data`; all three are addresses."""
    _take_in_block(builder, sums, data, secret)


@instruction(void(uint64, uint64, uint64, uint64))
def _copy_block(builder: Any, sums: Any, data: Any, secret: Any, target: Any) -> None:
    """The same, and copy the block to `target`."""
    _take_in_block(builder, sums, data, secret, target)


@instruction(void(uint64, uint64, uint64, uint64))
def _stream_block(builder: Any, sums: Any, data: Any, secret: Any, target: Any) -> None:
    """The same, past the caches; `target` is a multiple of _WIDTH."""
    _take_in_block(builder, sums, data, secret, target, past_caches=True)


@instruction(void())
def _all_stored(builder: Any) -> None:
    """Whoever learns of this call's end finds what was stored past the caches."""
    builder.fence("seq_cst")


@instruction(void(uint64, uint64, uint64))
def _add_stripe(builder: Any, sums: Any, data: Any, secret: Any) -> None:
    """Take in the stripe at `data`."""
    words = builder.load(_eight(builder, data, 0), align=1)
    found = _take_in(builder, builder.load(_eight(builder, sums, 0), align=1), words, secret, 0)
    builder.store(found, _eight(builder, sums, 0), align=1)


@instruction(uint64(uint64, uint64))
def _folded(builder: Any, first: Any, second: Any) -> Any:
    """The exclusive or of both halves of a product of 128 bits."""
    wide = ir.IntType(128)
    product = builder.mul(*(builder.zext(each, wide) for each in (first, second)))
    high = builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), ir.IntType(64))
    return builder.xor(builder.trunc(product, ir.IntType(64)), high)


@njit(nogil=True)
def _digest_of(source, blocks, sums, secrets):
    """XXH3-64 of `source`, whose first `blocks` blocks are in `sums`: all but the last one."""
    data, secret, out = uint64(source.ctypes.data), uint64(secrets.ctypes.data), uint64(sums.ctypes.data)
    for stripe in range((source.size - 1 - _BLOCK * blocks) // _STRIPE):
        _add_stripe(out, data + uint64(_BLOCK * blocks + _STRIPE * stripe), secret + uint64(8 * stripe))
    _add_stripe(out, data + uint64(source.size - _STRIPE), secret + uint64(_LAST))
    found = u64(source.size) * u64(0x9E3779B185EBCA87)
    for pair in range(4):
        key = secret + uint64(_MERGING + 16 * pair)
        found += _folded(sums[2 * pair] ^ load_word(key), sums[2 * pair + 1] ^ load_word(key + uint64(8)))
    found = (found ^ (found >> u64(37))) * u64(0x165667919E3779F9)
    return found ^ (found >> u64(32))


@njit(nogil=True)
def long_digest(source):
    """XXH3-64 of `source`, uint8, which has more than SHORT bytes."""
    sums, secrets = _SUMS.copy(), _SECRET.copy()
    data, secret, out = uint64(source.ctypes.data), uint64(secrets.ctypes.data), uint64(sums.ctypes.data)
    blocks = (source.size - 1) // _BLOCK
    for block in range(blocks):
        _add_block(out, data + uint64(_BLOCK * block), secret)
    return _digest_of(source, blocks, sums, secrets)


@njit(nogil=True)
def copied_digest(source, target, past_caches):
    """long_digest of `source`, which is copied to the start of `target` as it is read, for one pass is faster.

    past_caches: what is copied is too much for them. Then memory is not read before it is written.
    """
    sums, secrets = _SUMS.copy(), _SECRET.copy()
    data, secret, out = uint64(source.ctypes.data), uint64(secrets.ctypes.data), uint64(sums.ctypes.data)
    to, blocks = uint64(target.ctypes.data), (source.size - 1) // _BLOCK
    if past_caches and to % uint64(_WIDTH) == 0:
        for block in range(blocks):
            _stream_block(out, data + uint64(_BLOCK * block), secret, to + uint64(_BLOCK * block))
        _all_stored()
    else:
        for block in range(blocks):
            _copy_block(out, data + uint64(_BLOCK * block), secret, to + uint64(_BLOCK * block))
    copy_memory(to + uint64(_BLOCK * blocks), data + uint64(_BLOCK * blocks), uint64(source.size - _BLOCK * blocks))
    return _digest_of(source, blocks, sums, secrets)
