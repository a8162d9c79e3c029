"""Numba's kernels, compiled before the tests: each by one of their processes, and found by the others."""

import importlib
from collections.abc import Callable
from functools import partial

import torch


def _huffman() -> None:
    """Its kernels are compiled at their first call."""
    from kvrail.codec.huffman.codec import HuffmanCodec

    codec, tensor = HuffmanCodec(), torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    codec.decode(codec.encode(tensor))


MODULES = (
    "kvrail.codec.papers.lynx.cpu_kernels",
    "kvrail.codec.splitzip.entropy.cpu_kernels",
    "kvrail.codec.splitzip.progressive_ans.cpu_kernels",
    "kvrail.engine.kv.lossless.cpu_kernels",
    "kvrail.engine.kv.fixed.cpu_kernels",
    "kvrail.engine.kv.kvcomp.cpu_kernels",
    "kvrail.engine.kv.rotated.cpu_kernels",
    "kvrail.engine.attention.cpu_kernel",
    "kvrail.codec.papers.lynx.cpu_exact_kernels",
    "kvrail.codec.splitzip.one_stage.cpu_kernels",
)
STEPS: tuple[Callable[[], object], ...] = (_huffman, *(partial(importlib.import_module, name) for name in MODULES))
"""The first takes a third of the time and more, the last three nearly half."""


def compile_all(process: int) -> None:
    """Every second process of the tests begins at the end, so that two meet in the middle.

    In a fresh checkout all would otherwise compile the same at the same time, for a minute and a half.
    """
    for step in STEPS if process % 2 == 0 else reversed(STEPS):
        step()
