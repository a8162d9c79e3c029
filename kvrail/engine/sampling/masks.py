"""The tokens that a grammar allows in each row of a step, found while the model computes.

A row's mask depends on the output before it, drafts included, and on nothing else: a matcher (kvrail.grammar) moves to
the row's position. A step therefore draws the same with drafts and without, and on every worker.
"""

import math
import time
from collections.abc import Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLExecutor
from torch import Tensor

from kvrail.engine.request.sequence import Sequence
from kvrail.engine.schedule.planning import Step
from kvrail.errors import InvalidRequestError, KvrailError
from kvrail.grammar import Matcher

BITS = 32
WARY_S = 0.02
"""If the masks of a step take longer, those of the next are found and timed one by one."""
ALLOWED_S, ALLOWED_S_A_TOKEN = 0.1, 0.002
"""CPU seconds of one sequence's masks, if they are timed: most take 10 to 100 µs, the first one some ms."""


@dataclass(frozen=True, slots=True)
class Masks:
    """Masks of a step's rows.

    words: int32 [masks, ceil(V / 32)], bit i of word w is token 32 w + i. of_rows: int32 [R], each row's mask, or -1
    if all tokens are allowed. stuck: sequences for which none is.
    """

    words: npt.NDArray[np.int32]
    of_rows: npt.NDArray[np.int32]
    stuck: dict[Sequence, KvrailError] = field(default_factory=dict)


def mask_on_cpu(logits: Tensor, masks: Masks) -> Tensor:
    """`logits`, float32 [R, V] on the CPU, with -inf for tokens that a row's mask forbids; a new tensor."""
    masked = logits.clone()
    bits = np.unpackbits(masks.words.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
    forbidden = torch.from_numpy(bits == 0)
    for row, mask in enumerate(masks.of_rows):
        if mask >= 0:
            masked[row].masked_fill_(forbidden[mask], -math.inf)
    return masked


@dataclass(frozen=True, slots=True)
class _Run:
    """Rows of one sequence: the first is drawn behind `tokens`, each further one behind one more of `drafts`.

    first: the number of the first row's mask; those of the other rows follow it.
    """

    sequence: Sequence
    matcher: Matcher
    tokens: list[int]
    drafts: list[int]
    first: int


class MaskFinder:
    """Finds masks in a thread of its own, for one step at a time: call `begin` again once the last future is done.

    eos_token_ids: tokens that end an output, whatever their text is: allowed only if the grammar is complete.
    """

    def __init__(self, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._words = -(-vocab_size // BITS)
        self._no_end = np.full(self._words, -1, np.int32)
        bits = np.unpackbits(self._no_end.view(np.uint8), bitorder="little")
        bits[list(eos_token_ids)] = 0
        self._no_end = np.packbits(bits, bitorder="little").view(np.int32)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._executor = LLExecutor()
        self._wary = False  # the last masks took long

    def begin(self, step: Step) -> "Future[Masks] | None":
        """Begin to find the masks of `step`, whose sequences' tokens are all known; None if it needs none.

        The sequences must not change before the masks are here.
        """
        if not step.constrained():
            return None
        runs, of_rows = _runs(step)
        return self._thread.submit(self._find, runs, of_rows)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    def _find(self, runs: list[_Run], of_rows: npt.NDArray[np.int32]) -> Masks:
        words = np.full((int(of_rows.max(initial=-1)) + 1, self._words), -1, np.int32)
        stuck: dict[Sequence, KvrailError] = {}
        at_once: list[_Run] = []
        for run in runs:
            if run.matcher.move_to(run.tokens) < len(run.tokens):
                stuck[run.sequence] = _no_match(run)
                words[run.first] = 0
            elif not run.drafts:
                at_once.append(run)
        self._fill(words, [(run, run.first) for run in at_once], stuck)
        for run in runs:
            if run.drafts and run.sequence not in stuck:
                self._fill_behind_drafts(words, run, stuck)
        return Masks(words, of_rows, stuck)

    def _fill(
        self, words: npt.NDArray[np.int32], runs: list[tuple[_Run, int]], stuck: dict[Sequence, KvrailError]
    ) -> None:
        """Write the masks of the matchers' states, in parallel."""
        begin = time.perf_counter()
        try:
            if runs and not self._wary:
                places = [(run.matcher.state, mask) for run, mask in runs]
                self._executor.unsafe_compute_mask_ptr(places, words.ctypes.data, 4 * self._words, len(words))
        except ValueError:  # of one of them, which is found now
            self._wary = True
        if self._wary:
            self._fill_one_by_one(words, runs, stuck)
        self._wary = time.perf_counter() - begin > WARY_S
        for run, mask in runs:
            if not run.matcher.complete:
                words[mask] &= self._no_end
            self._keep_on(words, run, mask)
            if not words[mask].any():
                stuck.setdefault(run.sequence, _no_way_on(run))

    def _keep_on(self, words: npt.NDArray[np.int32], run: _Run, mask: int) -> None:
        """Before min_tokens no token that ends the output is allowed, unless the grammar allows nothing else."""
        params, count = run.sequence.params, len(run.tokens) + mask - run.first
        if count >= params.min_tokens:
            return
        longer = words[mask] & self._no_end
        for token_id in params.stop_token_ids:
            longer.view(np.uint8)[token_id >> 3] &= ~(1 << (token_id & 7)) & 0xFF
        if longer.any():
            words[mask] = longer

    def _fill_one_by_one(
        self, words: npt.NDArray[np.int32], runs: list[tuple[_Run, int]], stuck: dict[Sequence, KvrailError]
    ) -> None:
        """Write them one by one and time each: a grammar that takes long for several tokens fails its request."""
        for run, mask in runs:
            begin = time.thread_time()
            try:
                run.matcher.state.unsafe_compute_mask_ptr(words[mask].ctypes.data, 4 * self._words)
            except ValueError as error:
                words[mask], stuck[run.sequence] = 0, KvrailError(f"the grammar's tokens cannot be found: {error}")
            run.matcher.seconds += time.thread_time() - begin
            if run.matcher.seconds > ALLOWED_S + ALLOWED_S_A_TOKEN * len(run.tokens):
                stuck[run.sequence] = _too_slow(run)
                words[mask] = 0

    def _fill_behind_drafts(self, words: npt.NDArray[np.int32], run: _Run, stuck: dict[Sequence, KvrailError]) -> None:
        """Write the masks of a run with drafts. Behind a draft that does not match all is allowed: it is rejected."""
        for count in range(len(run.drafts) + 1):
            before = [*run.tokens, *run.drafts[:count]]
            if run.matcher.move_to(before) < len(before):
                return
            self._fill(words, [(run, run.first + count)], stuck)


def _runs(step: Step) -> tuple[list[_Run], npt.NDArray[np.int32]]:
    """The runs of a step's rows, and each row's mask."""
    of_rows = np.full(len(step.rows), -1, np.int32)
    runs: dict[Sequence, _Run] = {}
    count = 0
    for number, (sequence, row) in enumerate(zip(step.drawn_for, step.rows, strict=True)):
        matcher, prompt = sequence.matcher, len(sequence.prompt_ids)
        if matcher is None or row.position > sequence.length() or sequence.finish_reason is not None:
            continue  # the draw of a sequence that has ended is not read
        run = runs.get(sequence)
        if run is None:
            tokens = sequence.slice(prompt, row.position)
            run = runs[sequence] = _Run(sequence, matcher, tokens, [], count)
            count += 1
        behind = row.position - prompt - len(run.tokens)
        if behind > len(run.drafts):
            run.drafts.extend(sequence.slice(row.position - 1, row.position))
            count += 1
        of_rows[number] = run.first + behind
    return list(runs.values()), of_rows


def _no_match(run: _Run) -> KvrailError:
    return InvalidRequestError(
        f"the output's first {len(run.tokens)} tokens do not match the grammar: {_why(run)}", param="grammar"
    )


def _no_way_on(run: _Run) -> KvrailError:
    return InvalidRequestError(
        f"after {len(run.tokens)} tokens the grammar allows no further one and no end: {_why(run)};"
        " send a simpler grammar",
        param="grammar",
    )


def _too_slow(run: _Run) -> KvrailError:
    return InvalidRequestError(
        f"the grammar takes too long to follow: {run.matcher.seconds:.2f} s for {len(run.tokens)} tokens; send a"
        " simpler one",
        param="grammar",
    )


def _why(run: _Run) -> str:
    lines: Iterable[str] = run.matcher.error.strip().splitlines()
    return next(iter(lines), "no token fits")[:300]
