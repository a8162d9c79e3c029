"""Processes that tests start to stop and kill them."""

import multiprocessing
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import BaseContext

import torch

PRELOADED = ("tests.transport.conformance.peer", "tests.transport.ucx.child")


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
