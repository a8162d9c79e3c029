"""How many tokens of prompts a step computes, and how the prompts share them."""

from collections.abc import Sequence as List
from dataclasses import dataclass

from kvrail.engine.request.sequence import Sequence
from kvrail.engine.schedule.cost import StepCostModel

USED_GAP = 0.9
"""Part of the gap limit that a step takes on average: some steps take longer than others, and tokens travel."""

ENOUGH_TOKENS = 1024
"""Once a step has as many tokens and ends a prompt, it takes up no other one: that would delay the first token of the
prompt that ends, and bring its own no earlier."""

ENOUGH_PART = 16
"""Where more wait in the engine, as in kvrail.LLM, a step takes a sixteenth of their tokens before it ends so. With two
prompts of 1,024 tokens a step takes 0.967 of the time a token (an 8B model, an H200), so from 32 such prompts on first
tokens come no later on average, and the last one sooner. A router gives a worker no more than two steps at a time."""


def enough_tokens(missing: int) -> int:
    """Tokens that are enough for a step, where `missing` tokens of prompts are still to be computed."""
    return max(ENOUGH_TOKENS, missing // ENOUGH_PART)


@dataclass(frozen=True, slots=True)
class StepBudget:
    """Bounds of one step and of the queue.

    max_batch_tokens: most tokens of a step. mixed_batch_tokens: the same if it computes chunks of prompts beside other
    work; 0: max_batch_tokens. prompt_rows: most prompt tokens that a step scores. gap_s: seconds that a step with other
    work is to take at most, by measurement; 0: no limit.
    """

    max_batch_tokens: int
    max_running: int
    max_waiting: int
    mixed_batch_tokens: int = 0
    prompt_rows: int = 256
    gap_s: float = 0.0

    def chunk_tokens(self, others: int, *, beside: bool, cost: StepCostModel | None = None) -> int:
        """Most prompt tokens in a step that computes `others` beside them; never 0 while the step has room.

        beside: whether a sequence waits for the end of this step, or will before it ends. cost: of steps so far.
        """
        room, most = self.max_batch_tokens - others, self.mixed_batch_tokens
        if not (beside and most):
            return room
        tokens = max(most - others, -(-most // 4))
        if self.gap_s and cost is not None:
            tokens = round(min(tokens, max(-(-most // 8), cost.tokens_within(USED_GAP * self.gap_s, others))))
        return min(room, tokens)


def share(prompts: List[tuple[Sequence, int]], ends: List[int], tokens: int, rows: int) -> list[int]:
    """Tokens of each prompt's next chunk: half of them for the oldest prompt, then for those that lack the fewest.

    A step that has enough tokens when it ends a prompt computes no more.

    prompts: oldest first, each with the number of tokens that are computed. ends: where each one's chunk has to end.
    tokens: most tokens of all chunks. rows: most rows of logits; a prompt that is scored takes one a token.
    """
    counts = [0] * len(prompts)
    if not prompts:
        return counts
    missing = [len(sequence.token_ids) - start for sequence, start in prompts]
    enough = tokens - enough_tokens(sum(missing))
    turns = sorted(range(len(prompts)), key=missing.__getitem__)  # the oldest first among equals
    for number, most in ((0, -(-tokens // 2)), *((number, tokens) for number in turns)):
        sequence, start = prompts[number]
        before, known = counts[number], max(0, sequence.scored - start)
        count = min(before + most, before + tokens, len(sequence.token_ids) - start, ends[number] - start)
        if sequence.scoring:
            taken = max(0, before - known)
            count = min(count, known + taken + rows)
            rows -= max(0, count - known) - taken
        counts[number] = count
        tokens -= count - before
        if count == missing[number] and tokens <= enough:
            break
    return counts
