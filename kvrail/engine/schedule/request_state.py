"""The state of one request: its sequences, their text, and how far it has got."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvrail.engine.request.events import Drafted, Output
from kvrail.engine.request.requests import EngineRequest, Resumed
from kvrail.engine.request.sequence import Sequence as Seq
from kvrail.engine.request.sequence import Status
from kvrail.engine.schedule.output import NewToken, SequenceText
from kvrail.engine.schedule.speculation import Draft, DraftText
from kvrail.text import Tokenizer
from kvrail.values.pagehash import PageHash
from kvrail.values.sampling import FinishReason


@dataclass(slots=True)
class RequestState:
    """One live request.

    hashes: of the prompt's full pages. unfinished: sequences that have not ended. deferred: sequences that are not
    queued before the prompt's KV is here. coarse: whether the prompt's pages hold a coarse form of its KV.
    """

    spec: EngineRequest
    hashes: Sequence[PageHash]
    tokenizer: Tokenizer | None
    unfinished: int
    sequences: list[Seq] = field(default_factory=list)
    deferred: list[Seq] = field(default_factory=list)
    coarse: bool = False
    admitted: bool = False
    prefill_started: bool = False
    completion_tokens: int = 0
    _texts: list[SequenceText | None] = field(default_factory=list)
    _draft_text: DraftText | None = None

    def add_sequence(self, arrival: int, resumed: Resumed | None = None) -> Seq:
        """Make the next of the n sequences. resumed: what another engine has generated of it."""
        spec, index = self.spec, len(self.sequences)
        sequence = Seq(
            spec.request_id,
            index,
            spec.params,
            list(spec.prompt_ids),
            arrival,
            False,
            spec.remote,
            spec.local_tokens,
            spec.prefill_only,
            spec.space,
            list(resumed.token_ids) if resumed else [],
            known_hashes=list(self.hashes),
            matcher=None if spec.grammar is None else spec.grammar.matcher(),
            scored=len(spec.prompt_ids) if index else spec.scored,
        )
        text = None if self.tokenizer is None or spec.prefill_only else SequenceText(self.tokenizer, sequence)
        self.sequences.append(sequence)
        self._texts.append(text)
        if resumed and resumed.ended:
            sequence.finish_reason, sequence.status = FinishReason.STOP, Status.FINISHED
        elif resumed and resumed.token_ids and text is not None:
            text.resume(resumed.token_ids)
        return sequence

    def alive(self) -> list[Seq]:
        """Sequences that have not ended."""
        return [sequence for sequence in self.sequences if sequence.finish_reason is None]

    def receiving(self) -> Seq | None:
        """The sequence whose pages a transfer writes, if there is one."""
        return next((s for s in self.sequences if s.status in (Status.RECEIVING, Status.DRAFTING)), None)

    def output(self, sequence: Seq, new: NewToken) -> Output:
        """The event that one more token makes; a stop string in its text may end the sequence."""
        self.completion_tokens += 1
        logprobs = () if new.token.logprobs is None else (new.token.logprobs,)
        text = self._texts[sequence.index]
        if text is None:
            return Output(sequence.index, (new.token.token_id,), "", logprobs, *new.ending)
        return text.push((new.token.token_id,), logprobs, new.count, new.ending)

    def drafted(self, sequence: Seq, draft: Draft) -> Drafted:
        """The event that one more draft makes."""
        if self._draft_text is None:
            self._draft_text = DraftText(self.tokenizer, sequence)
        return self._draft_text.push(draft)

    def end_drafts(self) -> None:
        """The drafts so far were verified or dropped: the next one's text begins behind the output."""
        self._draft_text = None
