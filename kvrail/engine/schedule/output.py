"""From sampled tokens to output: when a sequence ends, and the text that its tokens complete."""

from dataclasses import dataclass

from kvrail.engine.batch.batch import SampledToken
from kvrail.engine.request.events import Output
from kvrail.engine.request.requests import ModelLimits
from kvrail.engine.request.sequence import Sequence
from kvrail.text import IncrementalDetokenizer, StopMatcher, Tokenizer
from kvrail.values.sampling import FinishReason, SamplingParams, TokenLogprobs

Ending = tuple[FinishReason | None, str]
"""Why a sequence ends, if it does, and the stop string or token id that ended it, if one did."""


@dataclass(frozen=True, slots=True)
class NewToken:
    """A token that was appended to a sequence; its text is still to be made.

    count: the sequence's output tokens up to this one. ending: whether it ends the sequence.
    """

    token: SampledToken
    count: int
    ending: Ending


def ending_of(sequence: Sequence, newest: int, length: int, limits: ModelLimits) -> Ending:
    """Whether the token `newest` ends the sequence, if it is the last of `length` tokens."""
    params, count = sequence.params, length - len(sequence.prompt_ids)
    if count > params.min_tokens or not params.min_tokens:
        if newest in params.stop_token_ids:
            return FinishReason.STOP, str(newest)
        if newest in limits.eos_token_ids and not params.ignore_eos:
            return FinishReason.STOP, ""
    if params.grammar and newest in limits.eos_token_ids:  # before min_tokens it is drawn where nothing else is allowed
        return FinishReason.STOP, ""
    if count >= params.max_tokens or length >= limits.max_model_len:
        return FinishReason.LENGTH, ""
    return None, ""


def ends_by_length(sequence: Sequence, limits: ModelLimits) -> bool:
    """Whether the next token is the last, whatever it is."""
    length = sequence.length() + 1
    return length - len(sequence.prompt_ids) >= sequence.params.max_tokens or length >= limits.max_model_len


def banned_tokens(params: SamplingParams, count: int, eos_token_ids: frozenset[int]) -> tuple[int, ...]:
    """Tokens that must not be drawn after `count` output tokens: those that would end it before min_tokens.

    Where a grammar binds the output its masks leave them out.
    """
    if count >= params.min_tokens or params.grammar:
        return ()
    return (*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids))


class SequenceText:
    """Text of one sequence, token by token, with stop strings cut out."""

    def __init__(self, tokenizer: Tokenizer, sequence: Sequence) -> None:
        params = sequence.params
        self._sequence = sequence
        self._detokenizer = IncrementalDetokenizer(tokenizer, sequence.prompt_ids, params.skip_special_tokens)
        self._matcher = StopMatcher(params.stop, params.include_stop_in_output)

    def push(
        self, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...], count: int, ending: Ending
    ) -> Output:
        """The output of these tokens; the last is token number `count` of the sequence's output.

        A stop string that they complete turns into the finish reason.
        """
        reason, stop_reason = ending
        stopped_by_token = reason is FinishReason.STOP and not self._sequence.params.include_stop_in_output
        text = self._detokenizer.push(token_ids[:-1] if stopped_by_token else token_ids)
        if reason is not None:
            text += self._detokenizer.flush()
        if count > self._sequence.params.min_tokens:
            found = self._matcher.push(text)
            text, matched = found.text_to_emit, found.matched
            if matched is None and reason is not None:
                rest = self._matcher.flush()
                text, matched = text + rest.text_to_emit, rest.matched
            if matched is not None:
                reason, stop_reason = FinishReason.STOP, matched
        return Output(self._sequence.index, token_ids, text, logprobs, reason, stop_reason)

    def resume(self, token_ids: tuple[int, ...]) -> None:
        """Take in output that another engine has emitted; text that it held back comes with the next token.

        As there, the text of the first min_tokens tokens is not searched for stop strings.
        """
        unsearched = token_ids[: self._sequence.params.min_tokens]
        self.push(unsearched, (), len(unsearched), (None, ""))
        if len(token_ids) > len(unsearched):
            self.push(token_ids[len(unsearched) :], (), len(token_ids), (None, ""))
