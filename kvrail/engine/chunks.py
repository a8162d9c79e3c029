"""How a step's chunks of prompts share what the step has left."""

from collections.abc import Sequence as List

from kvrail.engine.sequence import Sequence


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
