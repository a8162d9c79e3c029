"""How many tokens of prompts go into a step, and how their chunks share what it has left."""

from collections.abc import Sequence as List
from dataclasses import dataclass

from kvrail.engine.request.sequence import Sequence

MANY = 16
"""So many who decode are not held up for the sake of one prompt. Beside fewer a prompt gets on faster: 8 streams of
8,000 tokens over a prefill worker that they overload had their first tokens in half the time."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one step and of the queue.

    mixed_batch_tokens: of a step that computes chunks of prompts beside other work; 0: max_batch_tokens.
    helping_batch_tokens: the same beside MANY or more where there are prefill workers, whom this engine only helps; 0:
    mixed_batch_tokens.
    prompt_rows: tokens of a step from whose logits log probabilities of prompts are made.
    """

    max_batch_tokens: int
    max_running: int
    max_waiting: int
    mixed_batch_tokens: int = 0
    prompt_rows: int = 256
    helping_batch_tokens: int = 0

    def chunk_tokens(self, others: int, *, beside: bool, helping: bool = False) -> int:
        """Tokens of prompts in a step that computes so many others. However many these are, prompts get on.

        beside: whether anyone waits for the end of this step, or will before it has come.
        """
        room, most = self.max_batch_tokens - others, self.mixed_batch_tokens
        if helping and others >= MANY:
            most = self.helping_batch_tokens or most
        return min(room, max(most - others, -(-most // 4))) if beside and most else room


def share(prompts: List[tuple[Sequence, int]], tokens: int, rows: int, page_size: int) -> list[int]:
    """Tokens of the next chunk of each prompt: half of all is the oldest one's, the rest for who lacks the fewest.

    prompts: oldest first, each with the number of its tokens that are computed. tokens: of all chunks at most. rows: of
    logits, of which a prompt whose tokens' log probabilities are asked for takes one a token.
    """
    counts = [0] * len(prompts)
    if not prompts:
        return counts
    missing = [len(sequence.token_ids) - start for sequence, start in prompts]
    turns = sorted(range(len(prompts)), key=missing.__getitem__)  # of equals the oldest
    for number, most in ((0, -(-tokens // 2)), *((number, tokens) for number in turns)):
        sequence, start = prompts[number]
        before, known = counts[number], max(0, sequence.scored - start)
        count = _room(sequence, start, min(before + most, before + tokens), page_size)
        if sequence.scoring:
            taken = max(0, before - known)
            count = min(count, known + taken + rows)
            rows -= max(0, count - known) - taken
        counts[number] = count
        tokens -= count - before
    return counts


def _room(sequence: Sequence, start: int, tokens: int, page_size: int) -> int:
    """At most `tokens` of a prompt from `start` on.

    A first token that came from elsewhere may lie behind the prompt's pages: it decodes after them.
    """
    in_pages = len(sequence.page_table) * page_size - start
    return min(tokens, len(sequence.token_ids) - start, in_pages)
