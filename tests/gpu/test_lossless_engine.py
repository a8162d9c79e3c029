"""Whole models over lossless pages on CUDA: the same bits as over plain ones, captured and not."""

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from kvrail.engine.batch.batch import SequenceSlice  # noqa: E402
from kvrail.engine.kv.closing_cache import LosslessCache, PoolSize  # noqa: E402
from kvrail.engine.model.loader import load_model  # noqa: E402
from kvrail.engine.step.runner import ModelRunner  # noqa: E402
from tests.lossless.serving import DEMO_MODEL, answers, demo_ids, requests  # noqa: E402

OPTIONS = {"device": "cuda", "max_running": 8, "max_batch_tokens": 256, "max_model_len": 640, "kv_memory_gib": 0.0093}
"""Memory of 19 plain pages."""


def test_an_engine_answers_the_same() -> None:
    asked = requests(80, 400, 120)
    plain, _ = answers("plain", asked, eager=True, **OPTIONS)
    lossless, closing = answers("lossless", asked, eager=True, **OPTIONS)
    assert lossless == plain
    assert closing._closer.pages > 80


def close(cache: LosslessCache, pages: list[int]) -> None:
    """Close full pages as an engine does."""
    slots = cache.slots
    for page in pages:
        slots.fill(page)
    outcome = cache.close(slots.choose(slots.ready()))
    assert outcome.known(wait=True) and not any(outcome.failed)
    assert slots.settle(outcome.failed) == len(pages)


def test_captured_steps_over_closed_pages() -> None:
    loaded = load_model(
        DEMO_MODEL, device="cuda", dtype="bfloat16", kv_dtype="bfloat16", page_size=64, load_format="safetensors"
    )
    found = []
    for size in (40, PoolSize(60, 40)):
        runner = ModelRunner(loaded, size, max_running=6, max_batch_tokens=512, compile=False)
        runner.warm_up()
        assert runner.finding.holds
        slots = runner.cache.slots
        if slots is not None:
            slots.clear()
            for page in range(40):
                slots.begin(page)
        tables = [list(range(6 * row, 6 * row + 6)) for row in range(6)]
        ids = [demo_ids()[100 * row :][: 150 + 31 * row] for row in range(6)]
        logits = []
        for row in range(6):
            logits.append(runner.execute([SequenceSlice(ids[row], 0, tables[row], 1)]).clone())
            if slots is not None and row % 2:
                close(runner.cache, tables[row][: len(ids[row]) // 64 - row % 3 // 2])
        for step in range(3):
            begins = [len(each) + step for each in ids]
            decodes = [SequenceSlice([7], begin, table, 1) for begin, table in zip(begins, tables, strict=True)]
            logits.append(runner.execute(decodes).clone())
        begins = [len(each) + 3 for each in ids]
        mixed = [SequenceSlice([9] * (row + 1), begins[row], tables[row], row + 1) for row in range(6)]
        logits.append(runner.execute(mixed).clone())
        copied = SequenceSlice([5], 63, [39], 1, copied_page=tables[5][0])  # closed, where pages are
        logits.append(runner.execute([copied]).clone())
        found.append(torch.cat(logits))
    assert torch.equal(*(each.view(torch.int32) for each in found))
