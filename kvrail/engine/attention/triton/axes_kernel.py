"""Products with queries as rows or as columns.

A tensor core's instruction multiplies 16 rows by 8 columns. Many queries fill its rows. In decode a KV head has few:
four of them, as columns, leave half of the products unused, as rows three quarters. So where opening pages keeps a
processor busy, queries are columns: half of the products, weights and registers. No bit changes with that, since every
sum goes over the same numbers in the same order.

KEYS is the axis of keys in a tensor of scores, and of channels in one of weighted values: 1 where queries are rows.
"""

import triton
import triton.language as tl


@triton.constexpr_function
def sized(queries: int, others: int, keys: int) -> list[int]:
    """The shape of a tensor of `queries` queries and `others` keys or channels."""
    return [queries, others] if keys else [others, queries]


@triton.constexpr_function
def sums_of(keys: int) -> int:
    """How often a query's sum of weights is there: in all columns of an instruction, or in the rows of four warps'."""
    return 8 if keys else 64


@triton.jit
def along(x, AXIS: tl.constexpr):
    """Numbers that lie along an axis, as they broadcast to a tensor of two."""
    return tl.expand_dims(x, 1 - AXIS)


@triton.jit
def product(queries, others, acc, KEYS: tl.constexpr):
    """`acc`, or nothing, and the product of a tensor of queries and one of keys or values: see dealt."""
    if KEYS:
        found = tl.dot(queries, others, acc, input_precision="ieee")
    else:
        found = tl.dot(others, queries, acc, input_precision="ieee")
    return found


@triton.jit
def dealt(tile, KEYS: tl.constexpr):
    """A closed tile as an operand. tile: [summed, columns], as `open_keys` and `open_values` have it.

    As rows, columns are in another order, in which what a thread has of the tile is what it multiplies.
    """
    if not KEYS:
        SUMMED: tl.constexpr = tile.shape[0]
        COLUMNS: tl.constexpr = tile.shape[1]
        parts = tl.reshape(tile, [SUMMED, 2, COLUMNS // 64, 4, 8])
        tile = tl.reshape(tl.permute(parts, (2, 3, 1, 4, 0)), [COLUMNS, SUMMED])
    return tile


@triton.jit
def dealt_numbers(COUNT: tl.constexpr, DEALT: tl.constexpr):
    """From 0 to COUNT - 1; if DEALT, which column each row of a dealt tile was."""
    number = tl.arange(0, COUNT)
    if DEALT:
        number = (number // 8 % 2 * (COUNT // 64) + number // 64) * 32 + number // 16 % 4 * 8 + number % 8
    return number


@triton.jit
def gathered(weights, KEYS: tl.constexpr):
    """Weights of dealt keys in the order of keys."""
    if not KEYS:
        BLOCK: tl.constexpr = weights.shape[0]
        QUERIES: tl.constexpr = weights.shape[1]
        parts = tl.reshape(weights, [BLOCK // 64, 4, 2, 8, QUERIES])
        weights = tl.reshape(tl.permute(parts, (2, 0, 1, 3, 4)), [BLOCK, QUERIES])
    return weights
