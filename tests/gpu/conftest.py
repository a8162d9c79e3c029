"""Each test begins with products as a fresh process computes them."""

import pytest
import torch

from kvrail.engine.step.invariance import choose_products


@pytest.fixture(autouse=True)
def products_as_at_start() -> None:
    if torch.cuda.is_available():
        choose_products(invariant=False)
