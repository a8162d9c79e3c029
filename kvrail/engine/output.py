"""From sampled tokens to output: when a sequence ends, and which text its tokens completed."""

from collections.abc import Iterable

from kvrail.engine.events import Output
from kvrail.engine.sequence import Sequence
from kvrail.sampling import FinishReason, TokenLogprobs
from kvrail.text import IncrementalDetokenizer, StopMatcher, Tokenizer


def ending_of(sequence: Sequence, eos_token_ids: frozenset[int], max_model_len: int) -> tuple[FinishReason | None, str]:
    """Whether the sequence's newest token ends it, and the stop token id that did, if one did."""
    params, count, newest = sequence.params, len(sequence.output_ids), sequence.output_ids[-1]
    if count > params.min_tokens or not params.min_tokens:
        if newest in params.stop_token_ids:
            return FinishReason.STOP, str(newest)
        if newest in eos_token_ids and not params.ignore_eos:
            return FinishReason.STOP, ""
    if count >= params.max_tokens or len(sequence.token_ids) >= max_model_len:
        return FinishReason.LENGTH, ""
    return None, ""


def banned_tokens(sequence: Sequence, eos_token_ids: frozenset[int]) -> tuple[int, ...]:
    """Tokens that must not be drawn next: those that would end the sequence before min_tokens."""
    params = sequence.params
    if len(sequence.output_ids) >= params.min_tokens:
        return ()
    return (*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids))


class SequenceText:
    """Text of one sequence as its tokens come, with stop strings cut out."""

    def __init__(self, tokenizer: Tokenizer, sequence: Sequence) -> None:
        params = sequence.params
        self._sequence = sequence
        self._detokenizer = IncrementalDetokenizer(tokenizer, sequence.prompt_ids, params.skip_special_tokens)
        self._matcher = StopMatcher(params.stop, params.include_stop_in_output)

    def push(
        self, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...], ending: tuple[FinishReason | None, str]
    ) -> Output:
        """The output that these tokens make. A stop string that they complete turns into the finish reason."""
        reason, stop_reason = ending
        stopped_by_token = reason is FinishReason.STOP and not self._sequence.params.include_stop_in_output
        text = self._detokenizer.push(token_ids[:-1] if stopped_by_token else token_ids)
        if reason is not None:
            text += self._detokenizer.flush()
        if len(self._sequence.output_ids) <= self._sequence.params.min_tokens:
            return self._output(token_ids, text, logprobs, reason, stop_reason)
        found = self._matcher.push(text)
        text = found.text_to_emit
        if found.matched is not None:
            return self._output(token_ids, text, logprobs, FinishReason.STOP, found.matched)
        if reason is not None:
            rest = self._matcher.flush()
            text += rest.text_to_emit
            if rest.matched is not None:
                return self._output(token_ids, text, logprobs, FinishReason.STOP, rest.matched)
        return self._output(token_ids, text, logprobs, reason, stop_reason)

    def _output(
        self,
        token_ids: Iterable[int],
        text: str,
        logprobs: tuple[TokenLogprobs, ...],
        reason: FinishReason | None,
        stop_reason: str,
    ) -> Output:
        return Output(self._sequence.index, tuple(token_ids), text, logprobs, reason, stop_reason)
