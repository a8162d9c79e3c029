"""Where an output stands in its grammar."""

from collections.abc import Sequence

from llguidance import LLMatcher


class Matcher:
    """One output's place in a grammar.

    It can be moved to stand behind any tokens, ahead or back, so what it says depends on those tokens alone: not on
    drafts that were made and rejected, nor on which worker wrote the tokens.
    """

    def __init__(self, state: LLMatcher) -> None:
        """state: at the grammar's start; code that fills masks in batches reads it here.

        seconds: CPU time that its masks took, as far as it was looked at.
        """
        self.state = state
        self.seconds = 0.0
        self._taken: list[int] = []

    def move_to(self, tokens: Sequence[int]) -> int:
        """Stand behind `tokens`, or as far as the grammar allows; returns behind how many of them."""
        wanted = list(tokens)
        same = _common(self._taken, wanted)
        if same < len(self._taken):
            self.state.rollback(len(self._taken) - same)
            del self._taken[same:]
        if same < len(wanted):
            count = self.state.try_consume_tokens(wanted[same:])
            self._taken += wanted[same : same + count]
        return len(self._taken)

    @property
    def error(self) -> str:
        """Why the grammar cannot be followed any further; empty while it can."""
        return self.state.get_error()

    @property
    def complete(self) -> bool:
        """Whether the output may end here."""
        return self.state.is_accepting()


def _common(one: list[int], other: list[int]) -> int:
    """How many of the first tokens are the same."""
    shorter = min(len(one), len(other))
    if one[:shorter] == other[:shorter]:
        return shorter
    return next(i for i in range(shorter) if one[i] != other[i])
