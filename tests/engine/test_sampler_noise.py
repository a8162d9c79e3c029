"""The noise: known vectors of its parts, accuracy, distribution, independence."""

import math

import numpy as np
import pytest

from kvrail.engine.sampling.noise import gumbel_noise, hash_tokens, noise_key

TOKENS = np.arange(1 << 16, dtype=np.uint32)


def chi_square_z(observed: np.ndarray, expected: np.ndarray | float) -> float:
    """How many standard deviations a chi-square statistic lies off (Wilson and Hilferty 1931)."""
    statistic = float(((observed - expected) ** 2 / expected).sum())
    k = observed.size - 1
    return ((statistic / k) ** (1 / 3) - (1 - 2 / (9 * k))) / math.sqrt(2 / (9 * k))


def triple32(x: int, added: int) -> int:
    """Wellons' function in plain integers, with `added` after its first round."""
    x ^= x >> 17
    x = x * 0xED5AD4BB % 2**32
    x ^= x >> 11
    x = (x + added) * 0xAC4C1B51 % 2**32
    x ^= x >> 15
    x = x * 0x31848BAB % 2**32
    return x ^ x >> 14


def uniform(seed: int = 0, index: int = 0, position: int = 0, tokens: np.ndarray = TOKENS) -> np.ndarray:
    """What the noise is made of, back in (0, 1)."""
    return np.exp(-np.exp(-gumbel_noise(noise_key(seed, index, position), tokens).astype(np.float64)))


def test_key_is_three_steps_of_splitmix64() -> None:
    # The generator's published first output for seed 0 is 0xE220A8397B1DCDAF.
    def step(state: int) -> int:
        z = (state + 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    assert step(0) == 0xE220A8397B1DCDAF
    for seed, index, position in [(0, 0, 0), (2**64 - 1, 3, 10**6), (12345, 127, 1)]:
        state = step(step(step(seed) ^ index) ^ position)
        assert noise_key(seed, index, position) == (state % 2**32, state >> 32)


def test_hash_equals_plain_integers() -> None:
    for key in [(0, 0), (1, 2), (0xFFFFFFFF, 0xFFFFFFFF), (0x9E3779B9, 0x7F4A7C15)]:
        ids = np.array([0, 1, 2, 31999, 151935, 2**31 - 1], dtype=np.uint32)
        expected = [triple32((int(token_id) + key[0]) % 2**32, key[1]) for token_id in ids]
        assert hash_tokens(key, ids).tolist() == expected


def test_hash_with_zero_keys_is_the_published_permutation() -> None:
    ids = np.arange(1, 200_000, dtype=np.uint32)
    assert len(np.unique(hash_tokens((7, 9), ids))) == len(ids)


def test_noise_is_accurate_and_finite() -> None:
    key = noise_key(5, 0, 0)
    v = ((hash_tokens(key, TOKENS) >> 1).astype(np.float64) + 0.5) / 2**31
    exact = -np.log(-np.log1p(-v))
    noise = gumbel_noise(key, TOKENS)
    assert noise.dtype == np.float32 and np.isfinite(noise).all()
    off = np.abs(noise - exact)
    assert off[noise > 0].max() < 1e-6
    assert off.max() < 1e-3  # near its minimum, where it never decides, v is coarse


def test_extreme_hashes_give_finite_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    edge = np.array([0, 1, 2, 255, 2**32 - 1, 2**32 - 128, 2**31, 2**31 - 1], dtype=np.uint32)
    monkeypatch.setattr("kvrail.engine.sampling.noise.hash_tokens", lambda key, ids: edge.copy())
    noise = gumbel_noise((0, 0), edge)
    assert np.isfinite(noise).all()
    assert noise.max() == pytest.approx(32 * math.log(2), rel=1e-6)
    assert noise.min() == pytest.approx(-math.log(24 * math.log(2)), rel=1e-5)


def test_noise_of_a_token_is_the_same_in_any_slice() -> None:
    key = noise_key(1, 2, 3)
    whole = gumbel_noise(key, TOKENS)
    for size in (1, 2, 7, 16, 31, 33, 500, 4097):
        part = np.random.default_rng(size).permutation(TOKENS)[:size]
        assert np.array_equal(gumbel_noise(key, part), whole[part])


@pytest.mark.parametrize("seed", [0, 1, 2, 1 << 40, 2**64 - 1])
def test_uniformity(seed: int) -> None:
    """Chi-square over 4,096 equal cells, and Kolmogorov and Smirnov's distance."""
    for position in (0, 1, 5000):
        u = uniform(seed, 0, position)
        assert abs(chi_square_z(np.bincount((u * 4096).astype(int), minlength=4096), len(u) / 4096)) < 4
        distance = np.abs(np.sort(u) - (np.arange(len(u)) + 0.5) / len(u)).max()
        assert distance * math.sqrt(len(u)) < 1.95  # probability 0.001


@pytest.mark.parametrize(
    "pair",
    [
        {"position": 1},
        {"position": 2},
        {"position": 64},
        {"index": 1},
        {"seed": 1},
        {"seed": 1 << 32},
        {"seed": 1 << 63},
        {"index": 1, "position": 1},
    ],
)
def test_neighbouring_keys_are_independent(pair: dict[str, int]) -> None:
    """Chi-square of the joint distribution over 64 x 64 cells."""
    a, b = uniform(), uniform(**pair)
    table = np.bincount((a * 64).astype(int) * 64 + (b * 64).astype(int), minlength=4096)
    assert abs(chi_square_z(table, len(a) / 4096)) < 4
    assert abs(np.corrcoef(a, b)[0, 1]) * math.sqrt(len(a)) < 4


@pytest.mark.parametrize("lag", [1, 2, 3, 16, 256, 4096])
def test_neighbouring_tokens_are_independent(lag: int) -> None:
    u = np.concatenate([uniform(seed) for seed in range(4)])
    a, b = u[:-lag], u[lag:]
    table = np.bincount((a * 64).astype(int) * 64 + (b * 64).astype(int), minlength=4096)
    assert abs(chi_square_z(table, len(a) / 4096)) < 4


def test_one_token_over_positions_is_uniform_and_independent() -> None:
    token = np.array([17], dtype=np.uint32)
    u = np.array([uniform(9, 0, position, token)[0] for position in range(20_000)])
    assert abs(chi_square_z(np.bincount((u * 256).astype(int), minlength=256), len(u) / 256)) < 4
    table = np.bincount((u[:-1] * 16).astype(int) * 16 + (u[1:] * 16).astype(int), minlength=256)
    assert abs(chi_square_z(table, (len(u) - 1) / 256)) < 4


def test_avalanche() -> None:
    """One flipped bit of seed, index, position or token id flips each output bit half of the time."""
    ids = TOKENS[:8192]
    base = hash_tokens(noise_key(3, 1, 100), ids)
    flipped = [hash_tokens(noise_key(3 ^ 1 << bit, 1, 100), ids) for bit in range(64)]
    flipped += [hash_tokens(noise_key(3, 1 ^ 1 << bit, 100), ids) for bit in range(8)]
    flipped += [hash_tokens(noise_key(3, 1, 100 ^ 1 << bit), ids) for bit in range(20)]
    flipped += [hash_tokens(noise_key(3, 1, 100), ids ^ np.uint32(1 << bit)) for bit in range(18)]
    samples = len(ids) // 2  # a token id and its flipped partner give the same difference
    for other in flipped:
        bits = np.unpackbits((base ^ other).view(np.uint8)).reshape(len(ids), 32)
        assert np.abs(bits.mean(axis=0) - 0.5).max() < 5 * 0.5 / math.sqrt(samples)


def test_pinned_values() -> None:
    """Workers of different versions repeat each other's draws; a change here breaks that."""
    noise = gumbel_noise(noise_key(42, 1, 1000), np.array([0, 1, 31999, 151935], dtype=np.uint32))
    assert noise.tolist() == pytest.approx([-1.373839, 4.101584, 0.692015, 0.645192], rel=1e-6)
