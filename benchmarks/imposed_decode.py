"""A decode worker that accepts as many drafts as a request's seed says, or all of them where these are fewer.

    python -m benchmarks.imposed_decode decode --port 7002 ...

For benchmarks/progressive.py with models of random weights. Drafts are made and verified by the steps that always do
it; the verdict alone is another. Accepted drafts become output, and the token behind them is the one that the exact
logits give there: what the steps cost is real, what they say is not. A greedy request's seed has no other use.
"""

from collections.abc import Sequence

from kvrail.cli.main import main
from kvrail.engine.batch.batch import SampledToken
from kvrail.engine.request.events import Verified
from kvrail.engine.request.sequence import Sequence as Seq
from kvrail.engine.schedule import tracker
from kvrail.engine.schedule.speculation import Drafting

WRONG = SampledToken(-1)
"""Equal to no draft."""


class ImposedDrafting(Drafting):
    """Drafting whose verdict is the seed's."""

    def verify(self, sequence: Seq, drawn: Sequence[SampledToken]) -> tuple[Verified, Sequence[SampledToken]]:
        """`drawn`, but the first drafts instead of what the exact logits give."""
        accepted = [SampledToken(token_id) for token_id in sequence.drafts[: sequence.params.seed]]
        verdict, _ = super().verify(sequence, [*accepted, WRONG])
        return verdict, [*accepted, drawn[len(accepted)]]


if __name__ == "__main__":
    tracker.Drafting = ImposedDrafting  # type: ignore[misc]
    raise SystemExit(main())
