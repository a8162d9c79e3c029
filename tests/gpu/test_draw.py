"""Draws from rows that several programs share, against the CPU's."""

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from kvrail.engine.sampling.draw import DrawParams, draw_on_cpu  # noqa: E402
from kvrail.engine.sampling.sampling_kernels import PROGRAMS, begin_draw  # noqa: E402
from tests.engine.test_sampler import mixed_rows, random_logits  # noqa: E402


@pytest.mark.parametrize("rows", [1, 5, 40, PROGRAMS + 1])
def test_rows_that_programs_share(rows: int) -> None:
    logits = random_logits(rows, 30_000, rows)
    params = [DrawParams.of(asked) for asked in mixed_rows(rows)]
    assert begin_draw(logits.cuda(), params).tolist() == draw_on_cpu(logits, params)
