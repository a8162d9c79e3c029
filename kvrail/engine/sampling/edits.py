"""Edits of logits before a draw: logit bias, banned tokens, repetition, frequency and presence penalties.

Only the entries that a request names are touched, so rows without edits cost nothing.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvrail.engine.batch.batch import SampleRow
from kvrail.values.sampling import LogitBias


def is_edited(row: SampleRow) -> bool:
    """Whether the row asks for any edit."""
    return bool(row.banned or row.params.logit_bias or _is_penalised(row))


def edit_logits(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Apply the edits of `rows` in vLLM's order: bias and bans, then the penalties.

    logits: float32 [R, V]; left as it is. Returns a copy, or `logits` itself if no row asks for an edit. Token ids
    outside the vocabulary cannot be drawn and are ignored.
    """
    if not any(is_edited(row) for row in rows):
        return logits
    edited = logits.clone()
    _add_biases(edited, rows)
    _penalise(edited, rows)
    return edited


def _is_penalised(row: SampleRow) -> bool:
    params = row.params
    return params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0


def _add_biases(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    vocab_size = logits.shape[1]
    found = [(i, *_laid_out(row.params.logit_bias, vocab_size)) for i, row in enumerate(rows) if row.params.logit_bias]
    if found:
        row_ids = np.concatenate([np.full(len(ids), i) for i, ids, _ in found])
        token_ids = np.concatenate([ids for _, ids, _ in found])
        places = torch.from_numpy(np.stack([row_ids, token_ids])).to(logits.device)
        biases = torch.from_numpy(np.concatenate([values for _, _, values in found])).to(logits.device)
        logits[places[0], places[1]] += biases
    banned = [(i, token_id) for i, row in enumerate(rows) for token_id in row.banned if 0 <= token_id < vocab_size]
    if banned:
        of_rows, of_tokens = torch.tensor(banned, device=logits.device).unbind(1)
        logits[of_rows, of_tokens] = float("-inf")


def _laid_out(biases: dict[int, float], vocab_size: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Token ids in the vocabulary and their biases; a LogitBias keeps them, since it may be as wide as that."""
    if isinstance(biases, LogitBias) and biases.laid_out is not None:
        kept: tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]] = biases.laid_out
        return kept
    token_ids = np.fromiter(biases.keys(), np.int64, len(biases))
    values = np.fromiter(biases.values(), np.float32, len(biases))
    known = (token_ids >= 0) & (token_ids < vocab_size)
    made = token_ids[known], values[known]
    if isinstance(biases, LogitBias):
        biases.laid_out = made
    return made


def _penalise(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    """Repetition counts prompt and output and divides or multiplies by sign; the others count the output alone."""
    found = [(i, *_penalties(row, logits.shape[1])) for i, row in enumerate(rows) if _is_penalised(row)]
    if not found:
        return
    row_ids = np.concatenate([np.full(len(ids), i) for i, ids, _ in found])
    token_ids = np.concatenate([ids for _, ids, _ in found])
    repetition = np.concatenate([np.full(len(ids), rows[i].params.repetition_penalty) for i, ids, _ in found])
    taken_off = np.concatenate([taken for _, _, taken in found])
    places = torch.from_numpy(np.stack([row_ids, token_ids])).to(logits.device)
    factors = torch.from_numpy(np.stack([repetition, taken_off]).astype(np.float32)).to(logits.device)
    values = logits[places[0], places[1]]
    values = torch.where(values > 0, values / factors[0], values * factors[0])
    logits[places[0], places[1]] = values - factors[1]


def _penalties(row: SampleRow, vocab_size: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return the token ids that a row penalises and what frequency and presence take off each of them."""
    params = row.params
    generated, counts = np.unique(np.array(row.output_ids, dtype=np.int64), return_counts=True)
    taken: npt.NDArray[np.float64] = np.asarray(params.frequency_penalty * counts + params.presence_penalty, np.float64)
    if params.repetition_penalty != 1.0:
        seen = np.union1d(np.array(row.prompt_ids, dtype=np.int64), generated)
        taken_of_seen = np.zeros(len(seen))
        taken_of_seen[np.searchsorted(seen, generated)] = taken
        generated, taken = seen, taken_of_seen
    inside = (generated >= 0) & (generated < vocab_size)
    return generated[inside], taken[inside]
