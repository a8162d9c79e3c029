"""Arithmetic in which the shape of a batch does not show."""

from dataclasses import replace

import pytest
import torch

import kvrail.worker
from kvrail.engine.loader import load_model


@pytest.fixture
def in_double_precision(monkeypatch):
    """The CPU's float32 kernels round a row differently in batches of different sizes.

    Now and then that moves an element of a bfloat16 KV page by its last bit, and with it everything behind: raw's
    output of one request alone and of the same one among others differs where two tokens are all but equal. In float64
    what remains is too small to move a bit, so that equality can be asked for without a tolerance.
    """

    def load(*args, **kwargs):
        loaded = load_model(*args, **kwargs)
        return replace(loaded, model=loaded.model.double(), dtype=torch.float64)

    monkeypatch.setattr(kvrail.worker, "load_model", load)
