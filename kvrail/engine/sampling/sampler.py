"""From logits to tokens.

The order of operations is vLLM's: log probabilities of the raw logits; the mask of a grammar; bias and banned tokens;
penalties; temperature; min_p, top_k, top_p; then one draw by the Gumbel-max method. The draw is keyed by (seed,
sequence index, position, token id) and depends on nothing else but the row's logits and mask, so it can be repeated:
verification samples the exact logits of a position again, in a batch of any other shape, and gets the token that
decoding without drafts would have got.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kvrail.engine.batch.batch import NOT_DRAWN, SampledToken, SampleRow
from kvrail.engine.batch.readback import Readback, to_list
from kvrail.engine.sampling.draw import DrawParams, draw_on_cpu
from kvrail.engine.sampling.edits import edit_logits, is_edited
from kvrail.engine.sampling.logprobs import token_logprobs
from kvrail.engine.sampling.masks import BITS, Masks, mask_on_cpu
from kvrail.errors import ConfigError
from kvrail.values.sampling import SamplingParams

DrawKernel = Callable[[Tensor, Sequence[DrawParams]], Tensor]
"""From logits and parameters: token ids, int64 [R], on the device of the logits."""
MaskKernel = Callable[[Tensor, Masks], Tensor]
"""From logits, float32 [R, V], and masks: a new tensor with -inf for tokens that a row's mask forbids."""


class Sampler:
    """Draws one token from each row of logits.

    vocab_size: length of a row. device: where the logits are, a CPU or CUDA device.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._draw, self._mask = _kernels_for(device)

    def warm_up(self) -> None:
        """Compile and load all kernels, so that no request waits for it."""
        asked = SamplingParams(max_tokens=1, temperature=0.0)
        kinds = [
            asked,
            replace(asked, temperature=0.5, top_p=0.5, top_k=2, min_p=0.1),
            replace(asked, logprobs=2),
            replace(asked, logit_bias={0: 1.0}, repetition_penalty=1.1, frequency_penalty=0.1, presence_penalty=0.1),
        ]
        words = np.full((1, -(-self._vocab_size // BITS)), -1, np.int32)
        logits = torch.zeros(2, self._vocab_size, device=self._device)
        for count in (1, 2):
            for params in kinds:
                rows = [SampleRow(params, 0, 1, [0], [0], (1,) if params.logit_bias else ())] * count
                self.sample(logits[:count], rows)
            self.begin(logits[:count], rows, Masks(words, np.zeros(count, np.int32))).wait()

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]:
        """Draw one token for each row.

        logits: float32 [R, V], rows contiguous; not modified. rows: R of them, in the same order.
        """
        return self.begin(logits, rows).wait()

    def params_of(self, rows: Sequence[SampleRow]) -> list[DrawParams]:
        """What the rows' draws depend on beside their logits.

        Empty if some row's logits are edited or its log probabilities are asked for.
        """
        return [DrawParams.of(row) for row in rows] if _are_plain(rows) else []

    def begin(
        self, logits: Tensor, rows: Sequence[SampleRow], masks: Masks | None = None, drawn: Tensor | None = None
    ) -> "PendingSample":
        """Begin to draw one token for each row.

        Waits for the tokens only if some row's logits are edited or its log probabilities are asked for; on a CPU they
        are drawn in this call. masks: which tokens may be drawn; None: all. drawn: int64 [R] on the device, the tokens,
        if the step itself has drawn them by `params_of`.
        """
        if drawn is not None:
            return PendingSample(drawn)
        if logits.shape != (len(rows), self._vocab_size) or logits.dtype != torch.float32:
            raise ValueError(
                f"logits are {logits.dtype} {tuple(logits.shape)}; expected float32 {(len(rows), self._vocab_size)}"
            )
        if not rows:
            return PendingSample(None, [])
        raw, logits = logits, logits if masks is None else self._mask(logits, masks)
        plain = _are_plain(rows)
        if plain and all(row.params.greedy for row in rows):
            peaks, token_ids = logits.max(dim=-1)
            return PendingSample(token_ids.masked_fill_(~peaks.isfinite(), NOT_DRAWN))
        token_ids = self._draw(edit_logits(logits, rows), [DrawParams.of(row) for row in rows])
        return PendingSample(token_ids) if plain else PendingSample(None, _with_logprobs(raw, rows, to_list(token_ids)))


class PendingSample:
    """Draws in progress. tokens: the drawn ids on the device, int64 [rows], or None if only the host has them."""

    def __init__(self, tokens: Tensor | None, known: list[SampledToken] | None = None) -> None:
        self.tokens = tokens
        self._known = known
        self._readback = None if tokens is None else Readback(tokens)

    def wait(self) -> list[SampledToken]:
        """Wait for the tokens: one a row."""
        if self._known is None:
            assert self._readback is not None
            self._known = [SampledToken(token_id) for token_id in self._readback.wait()]
        return self._known


def _are_plain(rows: Sequence[SampleRow]) -> bool:
    """Whether the draws depend on logits and parameters alone, and give no more than tokens."""
    return not any(row.params.logprobs is not None or is_edited(row) for row in rows)


def _kernels_for(device: torch.device) -> tuple[DrawKernel, MaskKernel]:
    if device.type == "cpu":
        return lambda logits, params: torch.tensor(draw_on_cpu(logits, params), dtype=torch.int64), mask_on_cpu
    if device.type == "cuda":
        from kvrail.engine.sampling.mask_kernel import mask_on_cuda  # Triton is installed only where it can run
        from kvrail.engine.sampling.sampling_kernels import begin_draw

        return begin_draw, mask_on_cuda
    raise ConfigError(f"device {device} has no sampler; choose cpu or cuda")


def _with_logprobs(logits: Tensor, rows: Sequence[SampleRow], token_ids: Sequence[int]) -> list[SampledToken]:
    """Attach log probabilities of the raw logits to the tokens of rows that ask for them."""
    wanting = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    tokens = [SampledToken(token_id) for token_id in token_ids]
    if not wanting:
        return tokens
    chosen = [max(0, token_ids[i]) for i in wanting]  # log probabilities of undrawn tokens are never read
    counts = [rows[i].params.logprobs or 0 for i in wanting]
    named = [rows[i].params.logprob_token_ids for i in wanting]
    for i, logprobs in zip(wanting, token_logprobs(logits[wanting], chosen, counts, named), strict=True):
        tokens[i] = SampledToken(token_ids[i], logprobs)
    return tokens
