"""The draw as compiled for an H100, on a CPU, with several programs a row, begun and continued in any order."""

import random
from pathlib import Path

from tests.ptx.compiled import emulated, in_a_child


def draw(seed: int, most: int) -> None:
    """In a process that compiles. most: programs at once."""
    import torch

    from kvrail.engine.sampling import sampling_kernels
    from kvrail.engine.sampling.draw import DrawParams, draw_on_cpu
    from tests.engine.test_sampler import random_logits, row

    draws = random.Random(seed)
    sampling_kernels.BLOCK, sampling_kernels.WARPS, sampling_kernels.FEW = 128, 1, 16
    kinds = [
        {"temperature": 0.0},
        {},
        {"top_k": 7, "temperature": 0.8},
        {"top_p": 0.9},
        {"top_k": 40, "top_p": 0.8, "min_p": 0.02, "temperature": 2.0},
        {"top_k": 3, "top_p": 0.5},
    ]
    params = [DrawParams.of(row(i, seed, **kind)) for i, kind in enumerate(kinds)]
    logits = random_logits(len(kinds), 700, seed)
    logits[5] = logits[5].round()  # equal ones
    logits[4, 600], broken = torch.inf, logits.clone()
    broken[4, 600] = torch.nan
    with emulated(by_turns=(draws, most)):
        given = broken if most < 3 * len(params) else logits
        assert sampling_kernels.begin_draw(given, params, 3 * len(params)).tolist() == draw_on_cpu(given, params)


def draw_twice() -> None:
    for most in (3, 100):
        draw(most, most)


def test_programs_of_a_row_agree(cache: Path) -> None:
    """Also where no more run at once than share a row, which holds a NaN."""
    in_a_child(draw_twice, cache=cache)
