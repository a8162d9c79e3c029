"""Processes that tests start to stop and kill them."""

import multiprocessing
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import BaseContext

import torch

from tests import kernels

PRELOADED = (
    "tests.forked",
    "tests.transport.conformance.peer",
    "tests.transport.ucx.child",
    "kvrail.cli.main",
    "kvrail.services.router.main",
    "kvrail.services.worker.main",
    "kvrail.services.worker.serving",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",  # the demo model's
    "uvloop",
    *kernels.MODULES,
)


def context() -> BaseContext:
    """How to start one: forked from a process that has imported what they need, and torch, and has done no more.

    With a GPU each imports that itself: what was forked after CUDA was asked for cannot use it.
    """
    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    forked = multiprocessing.get_context("forkserver")
    forked.set_forkserver_preload(list(PRELOADED))
    return forked


def ready() -> None:
    """Start what comes with the first of them and stays: it keeps descriptors."""
    resource_tracker.ensure_running()
    if context().get_start_method() == "forkserver":
        forkserver.ensure_running()
