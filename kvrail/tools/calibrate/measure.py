"""Exponents of the KV cache that the engine itself computes for some text."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import monotonic

import numpy as np
import torch

from kvrail.codec.splitzip.one_stage.exponents import Histogram, histogram
from kvrail.codec.splitzip.tiles.format import FORMATS
from kvrail.engine.batch.batch import SequenceSlice
from kvrail.engine.model.loader import LoadedModel
from kvrail.engine.step.runner import ModelRunner

logger = logging.getLogger("kvrail.calibrate")

TELL_S = 3.0
"""So often a line says how far it has come, or as often as a sequence is done."""
SEQUENCE_TOKENS = 2048
"""A text is computed in sequences of this many tokens, so that long texts need no more memory than this."""


@dataclass(frozen=True, slots=True, eq=False)
class Measurement:
    """How often each exponent occurs: keys and values, int64 [layers, exponents]; tokens: of how many tokens."""

    keys: Histogram
    values: Histogram
    tokens: int


def measure(loaded: LoadedModel, texts: Sequence[Sequence[int]]) -> Measurement:
    """Prefill each of `texts`, token ids, and count the exponents of what is then in the pages of each layer."""
    layout = loaded.layout
    length = min(SEQUENCE_TOKENS, loaded.max_model_len)
    pages = range(layout.pages_for(length))
    runner = ModelRunner(loaded, len(pages), max_running=1, max_batch_tokens=length, cuda_graphs=False, compile=False)
    keys, values = (np.zeros((layout.num_layers, FORMATS[layout.dtype].exponents), np.int64) for _ in range(2))
    total, done, reported = sum(map(len, texts)), 0, monotonic()
    logger.info("measuring the KV cache of %d tokens", total)
    for sequence in _sequences(texts, length):
        runner.execute([SequenceSlice(sequence, 0, pages, num_logits=0)])
        for layer in range(layout.num_layers):
            keys[layer] += _count(runner.cache.tensors["keys"][layer], len(sequence))
            values[layer] += _count(runner.cache.tensors["values"][layer], len(sequence))
        done += len(sequence)
        if monotonic() - reported > TELL_S:
            reported = monotonic()
            logger.info("measured %d of %d tokens", done, total)
    return Measurement(keys, values, total)


def _sequences(texts: Sequence[Sequence[int]], length: int) -> Iterator[Sequence[int]]:
    for text in texts:
        for start in range(0, len(text), length):
            yield text[start : start + length]


def _count(pool: torch.Tensor, tokens: int) -> Histogram:
    """Histogram of the first `tokens` slots of one layer's pages, [pages, page_size, kv_heads, dim]."""
    stored = pool.flatten(0, 1)[:tokens]
    bits = stored.view(torch.uint8 if stored.element_size() == 1 else torch.int16).cpu().numpy()
    return histogram(bits.view(f"u{stored.element_size()}"), FORMATS[str(pool.dtype).removeprefix("torch.")])
