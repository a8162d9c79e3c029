"""Drafts: tokens generated while only a coarse form of the prompt's KV is here, and their verification.

    coarse KV of the prompt in the pages    draft, one token a step, like any decoding sequence
    exact KV in the same pages              one step over the newest token and all drafts computes their KV again and
                                            the exact logits behind each of them
    draw again                              with the noise of each position, which is the same (sampler.py)

The first draft that the draw does not repeat, and all behind it, are wrong. The draws up to there are the tokens of a
run without drafts, whatever the temperature: they are what the exact logits of the true prefix give, and a draft is
never more than a guess of them. Drafting on coarse KV is Lynx's (Han et al., sections 4.2 and 4.3), which keeps the
distribution of the output; repeating the draw keeps the output itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvrail.engine.batch.batch import SampledToken
from kvrail.engine.request.events import Drafted, Verified
from kvrail.engine.request.requests import ModelLimits
from kvrail.engine.request.sequence import Sequence as Seq
from kvrail.engine.request.sequence import Status
from kvrail.engine.schedule.output import Ending, ending_of
from kvrail.engine.schedule.scheduler import Work
from kvrail.telemetry.worker import EngineMetrics
from kvrail.text import IncrementalDetokenizer, Tokenizer
from kvrail.values.sampling import FinishReason


@dataclass(frozen=True, slots=True)
class Draft:
    """One draft, and whether it would end its sequence."""

    token_id: int
    ending: Ending


class Drafting:
    """When sequences draft, and which drafts are kept.

    max_drafts: most tokens that a sequence drafts; 0 turns drafting off.
    """

    def __init__(self, limits: ModelLimits, metrics: EngineMetrics, max_drafts: int) -> None:
        self._limits = limits
        self._metrics = metrics
        self._max_drafts = max_drafts

    def can_begin(self, sequence: Seq) -> bool:
        """Whether a sequence whose pages hold coarse KV drafts now: it has its first token and has not drafted yet.

        A request with n > 1 does not draft, since one sequence holds the pages for all.
        """
        fresh = sequence.status is Status.RECEIVING and not sequence.drafts
        return fresh and bool(sequence.output_ids) and sequence.params.n == 1 and self._max_drafts > 0

    def add(self, work: Work, token_id: int) -> Draft | None:
        """Take in the draft that a step has drawn; None where it does not count."""
        sequence = work.sequence
        if not self.wants(work):
            return None
        full = self.fills(sequence)
        sequence.drafts.append(token_id)
        ending = ending_of(sequence, token_id, sequence.length(), self._limits)
        if (full or ending[0] is not None) and sequence.status is Status.DRAFTING:
            sequence.status = Status.RECEIVING  # the drafts wait for the exact KV
        return Draft(token_id, ending)

    def fills(self, sequence: Seq) -> bool:
        """Whether its next draft is the last one, whatever token it is."""
        return sequence.status is Status.DRAFTING and len(sequence.drafts) + 1 >= self._max_drafts

    def wants(self, work: Work) -> bool:
        """Whether a step's draft counts: earlier drafts were neither dropped since the step was planned, nor end it."""
        sequence, drafts = work.sequence, work.drafts
        if drafts is not sequence.drafts:
            return False
        return not drafts or ending_of(sequence, drafts[-1], sequence.length(), self._limits)[0] is None

    def verify(self, sequence: Seq, drawn: Sequence[SampledToken]) -> tuple[Verified, Sequence[SampledToken]]:
        """Compare the drafts with what the exact logits give; returns the tokens that are kept.

        drawn: one token for each draft, and one behind the last.
        """
        proposed, accepted = len(sequence.drafts), 0
        while accepted < proposed and sequence.drafts[accepted] == drawn[accepted].token_id:
            accepted += 1
        sequence.drafts = []
        self._metrics.drafts_proposed.inc(proposed)
        self._metrics.drafts_accepted.inc(accepted)
        self._metrics.accepted_drafts.observe(accepted)
        return Verified(sequence.index, proposed, accepted), drawn[: accepted + 1]


class DraftText:
    """Text of one sequence's drafts, as if they were output; stop strings are not looked for.

    It begins behind the text of all tokens so far, even if a possible stop string holds some of that text back.
    """

    def __init__(self, tokenizer: Tokenizer | None, sequence: Seq) -> None:
        self._sequence = sequence
        self._detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None:
            before, skips = sequence.token_ids, sequence.params.skip_special_tokens
            self._detokenizer = IncrementalDetokenizer(tokenizer, before, skips)

    def push(self, draft: Draft) -> Drafted:
        """The event with one more draft, for the client of a provisional request."""
        silent = draft.ending[0] is FinishReason.STOP and not self._sequence.params.include_stop_in_output
        text = "" if self._detokenizer is None or silent else self._detokenizer.push((draft.token_id,))
        return Drafted(self._sequence.index, (draft.token_id,), text)
