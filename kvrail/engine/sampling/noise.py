"""Counter-based Gumbel noise: a pure function of (seed, sequence index, position, token id).

Nothing else enters: not the row of the batch, its neighbours, the slice of the vocabulary, the thread or the device. A
token is drawn as argmax(logits / temperature + noise), the Gumbel-max method, so the same logits at the same place
always give the same token, in whatever batch they come again.

The function, in unsigned 32-bit arithmetic that wraps around (docs/decisions/0001-gumbel-noise.md has its tests):

1. (seed, index, position) are absorbed one after the other by splitmix64 into 64 bits; the halves are k0 and k1.
2. x = token id + k0, through Wellons' triple32 permutation with k1 added after its first round.
3. v = (upper 31 bits of x + 1/2) / 2^31, in (0, 1), at most 1 - 2^-24.
4. noise = -log(-log(1 - v)). As v is exact near 0, the noise is exact where it is large, which is where it decides.

sampling_kernels.py repeats it in Triton.
"""

import numpy as np
import numpy.typing as npt

MASK64 = (1 << 64) - 1
GOLDEN64 = 0x9E3779B97F4A7C15
MULTIPLIER_1, MULTIPLIER_2, MULTIPLIER_3 = 0xED5AD4BB, 0xAC4C1B51, 0x31848BAB
LARGEST_V = 1.0 - 2.0**-24
"""Largest float32 below 1; keeps log(1 - v) finite."""


def _splitmix64(state: int) -> int:
    """One output of splitmix64 (Steele, Lea, Flood 2014): a permutation of 64 bits."""
    z = (state + GOLDEN64) & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)


def noise_key(seed: int, index: int, position: int) -> tuple[int, int]:
    """Return the two 32-bit keys (k0, k1) of the draw at `position` of sequence `index`; seed may have 64 bits."""
    state = _splitmix64(seed & MASK64)
    state = _splitmix64(state ^ index)
    state = _splitmix64(state ^ position)
    return state & 0xFFFFFFFF, state >> 32


def hash_tokens(key: tuple[int, int], token_ids: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Return 32 mixed bits for each token id; uint32 [N] -> uint32 [N]."""
    x = token_ids + np.uint32(key[0])
    shifted = x >> np.uint32(17)
    x ^= shifted
    x *= np.uint32(MULTIPLIER_1)
    np.right_shift(x, np.uint32(11), out=shifted)
    x ^= shifted
    x += np.uint32(key[1])
    x *= np.uint32(MULTIPLIER_2)
    np.right_shift(x, np.uint32(15), out=shifted)
    x ^= shifted
    x *= np.uint32(MULTIPLIER_3)
    np.right_shift(x, np.uint32(14), out=shifted)
    x ^= shifted
    return x


def gumbel_noise(key: tuple[int, int], token_ids: npt.NDArray[np.uint32]) -> npt.NDArray[np.float32]:
    """Return standard Gumbel noise for each token id; uint32 [N] -> float32 [N], in about [-2.9, 22.2]."""
    bits = hash_tokens(key, token_ids)
    bits >>= np.uint32(1)
    v = bits.view(np.int32).astype(np.float32)  # the signed conversion is the fast one
    v += np.float32(0.5)
    v *= np.float32(2.0**-31)
    np.minimum(v, np.float32(LARGEST_V), out=v)
    noise = _minus_log1p_minus(v)
    np.log(noise, out=noise)
    return np.negative(noise, out=noise)


def _minus_log1p_minus(v: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return -log(1 - v), float32 [N], for v in (0, 1), to a few units in the last place.

    By Kahan's method: the rounding of w = 1 - v is divided out again. numpy's log is vectorised on more CPUs than its
    log1p, and the kernel computes the same.
    """
    w = np.float32(1.0) - v
    result: npt.NDArray[np.float32] = np.log(w)
    result *= v
    w -= np.float32(1.0)
    exact = np.flatnonzero(w == 0.0)  # v is below the rounding of 1 - v; log(1 - v) is -v
    w[exact] = 1.0
    result /= w
    result[exact] = v[exact]
    return result
