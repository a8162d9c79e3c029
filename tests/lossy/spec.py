"""What a model says over lossy pages, by the contract (docs/lossy-kv.md), slowly: plain pages alone, one token at a
time, closed and opened by the specification of the form. No engine, scheduler, slots or kernels over closed pages."""

import functools

import numpy as np
import torch

from kvrail.engine.batch.batch import SampleRow, SequenceSlice
from kvrail.engine.kv.lossless.form import TOKENS
from kvrail.engine.model.loader import LoadedModel, load_model
from kvrail.engine.request.requests import EngineRequest
from kvrail.engine.sampling.sampler import Sampler
from kvrail.engine.step.runner import ModelRunner
from tests.fixed.cases import close, opened

PAGE = 64


@functools.cache
def loaded(folder: str, device: str, eager: bool) -> LoadedModel:
    """eager: the model whose layers are not compiled, where a runner compiles them."""
    return load_model(
        folder, device=device, dtype="auto", kv_dtype="bfloat16", page_size=PAGE, load_format="safetensors"
    )


class Spec:
    """One model over lossy pages of `bits`, see lossy.CODE_BITS. most: pages of the longest sequence.

    eager, step_tokens: on CUDA, the engine's `eager` and `max_batch_tokens`. Compiled layers round otherwise than those
    that are not, and in the way that suits their first step.
    """

    def __init__(
        self,
        folder: str,
        bits: int,
        most: int = 16,
        device: str = "cpu",
        eager: bool = True,
        step_tokens: int = 1024,
    ) -> None:
        self._model, self._bits, self._most = loaded(folder, device, eager), bits, most
        self._step_tokens = step_tokens
        self._runner = ModelRunner(
            self._model,
            2 * most,
            max_running=1,
            max_batch_tokens=step_tokens,
            cuda_graphs=not eager,
            compile=not eager,
        )
        if not eager:
            self._runner.warm_up()
        self._sampler = Sampler(self._model.vocab_size, self._model.device)

    @property
    def numerics(self) -> str:
        """Digest of what the runner computes; empty where it is eager, which is not tried."""
        return self._runner.finding.numerics

    def says(self, request: EngineRequest, index: int = 0) -> list[int]:
        """The output of one of a request's sequences. Page `most` + i holds what closing leaves of page i."""
        prompt, tokens = list(request.prompt_ids), list(request.prompt_ids)
        for begin in range(0, len(prompt), self._step_tokens):
            piece = prompt[begin : begin + self._step_tokens]
            logits = self._runner.execute([SequenceSlice(piece, begin, range(self._most), 1)])
        closed, may_close = 0, True
        while True:
            row = SampleRow(request.params, index, len(tokens), prompt, tokens[len(prompt) :])
            tokens.append(self._sampler.sample(logits, [row])[0].token_id)
            if len(tokens) - len(prompt) == request.params.max_tokens:
                return tokens[len(prompt) :]
            position = len(tokens) - 1
            own = position // PAGE
            while may_close and closed < own - 2:
                may_close = self._close(closed + 1)
                closed += may_close
            table = [0, *range(self._most + 1, self._most + closed + 1), *range(closed + 1, own + 1)]
            logits = self._runner.execute([SequenceSlice(tokens[-1:], position, table, 1)])

    def _close(self, page: int) -> bool:
        """Close a page and open it into its copy; False if a tile is refused."""
        pools = [pool.view(torch.int16) for pool in self._runner.cache.as_block()]
        for layer, head, begin in np.ndindex(len(pools[0]), pools[0].shape[3], PAGE // TOKENS):
            rows = slice(begin * TOKENS, (begin + 1) * TOKENS)
            tiles = [pool[layer, page, rows, head].cpu().numpy().view(np.uint16) for pool in pools]
            data, refused = close(*tiles, self._bits)
            if refused:
                return False
            dims = tiles[0].shape[1], tiles[1].shape[1]
            for pool, tile in zip(pools, opened(data, dims, self._bits), strict=True):
                pool[layer, self._most + page, rows, head] = torch.from_numpy(tile.view(np.int16))
        return True
