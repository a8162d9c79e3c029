"""Captured steps: each draws what it is to draw, whatever the step before left in its buffers."""

import pytest
import torch

from kvrail.engine.batch.batch import SequenceSlice
from kvrail.engine.batch.packing import pack
from kvrail.engine.sampling.draw import DrawParams, draw_words
from kvrail.engine.step.buffers import StepBuffer, decode_size, mixed_size
from kvrail.values.sampling import SamplingParams
from tests.engine.captured_machine import MAX_LEN, QUERIES, without_cuda
from tests.engine.mixes.asking import request, tokenizer
from tests.engine.mixes.site import Setting, Site, answer_of

PAGE = 4


def test_a_prompt_whose_rows_and_draws_are_of_equal_count_gets_its_own_draws(monkeypatch):
    """Two rows of logits, scored and drawn from; two draws, both from the second row."""
    without_cuda(monkeypatch)
    limits = {"max_running": 8, "max_batch_tokens": 40}
    site = Site(Setting("captured", PAGE, pages=40, opened=0, context=MAX_LEN, limits=limits), tokenizer())
    for name, n in (("two", 2), ("one", 1)):
        params = SamplingParams(max_tokens=1, temperature=0.0, n=n, prompt_logprobs=0 if n > 1 else None)
        site.engine.submit(request(name, [50, 300], params))
        while site.engine.pending():
            site.engine.step()
    (wanted,) = answer_of(site, "one", 1).tokens
    assert answer_of(site, "two", 2).tokens == [wanted, wanted]
    site.close()


@pytest.mark.parametrize("draws", range(9))
@pytest.mark.parametrize("random_rows", [False, True])
def test_every_size_takes_steps_with_any_draws(draws, random_rows):
    """Alternates with greedy steps, so that anything that a random step leaves behind shows."""
    kinds = [DrawParams(0.0, 0, 1.0, -float("inf"), (0, 0)), DrawParams(0.7, 3, 0.9, -2.0, (1, 2))]
    params = [kinds[random_rows and row % 2] for row in range(draws)]
    decodes = [SequenceSlice([row], row, [0, 1, 2], 1) for row in range(max(1, draws))]
    for size in (decode_size(9, 3, 1), decode_size(9, 3, 1, 32), mixed_size(32, 9, 3, 1, 32, QUERIES)):
        buffer = StepBuffer(size, torch.device("cpu"))
        for now in (params, [], params, [kinds[0]] * draws):
            buffer.fill(pack(decodes, PAGE), draws=now)
            buffer.send()
            words = buffer.there.draws
            assert len(words) == size.draws
            if size.draws and any(each.temperature for each in now):
                assert torch.equal(words[: len(now)], torch.from_numpy(draw_words(now)))
            else:
                assert not words[:, 2].any()  # greedy
            assert not words[len(now) :].any()
