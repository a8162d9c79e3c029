"""A prompt's result, collected from the engine's events."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvrail.engine.request.events import Admitted, Event, Output, PromptScored
from kvrail.services.router.plan.translate import Plan
from kvrail.values.sampling import FinishReason, TokenLogprobs


@dataclass(slots=True)
class CompletionOutput:
    """One of a prompt's n outputs.

    logprobs: one entry a token, if they were asked for. finish_reason: "stop" or "length". stop_reason: the stop string
    or stop token id that ended the output; None: an end-of-sequence token or the length did.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its outputs.

    prompt: its text; of a chat, the text that the template wrote; None if token ids were given. prompt_logprobs: one
    entry a token, if they were asked for; the first is None. num_cached_tokens: tokens of the prompt whose KV the
    prefix cache held.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0


class Collector:
    """Collects the result of a plan of one prompt."""

    def __init__(self, plan: Plan, text: str | None) -> None:
        sampling, self._special_stops = plan.sampling[0], plan.special_stops
        self._stop: Sequence[str] = sampling.stop
        outputs = [
            CompletionOutput(index, logprobs=None if sampling.logprobs is None else []) for index in range(sampling.n)
        ]
        self.result = RequestOutput(text, list(plan.prompts[0]), outputs)
        if sampling.prompt_logprobs is not None:
            self.result.prompt_logprobs = [None]

    def take(self, event: Event) -> None:
        """Take in the request's next event."""
        match event:
            case Output():
                self._take_output(event)
            case Admitted():
                self.result.num_cached_tokens = event.cached_tokens
            case PromptScored():
                scores = event.logprobs
                assert self.result.prompt_logprobs is not None
                self.result.prompt_logprobs += [
                    TokenLogprobs(logprob, tuple(scores.most_likely(place)))
                    for place, logprob in enumerate(scores.logprobs)
                ]

    def _take_output(self, event: Output) -> None:
        output = self.result.outputs[event.index]
        output.text += event.text
        output.token_ids += event.token_ids
        if output.logprobs is not None:
            output.logprobs += event.logprobs
        if event.finish_reason is not None:
            output.finish_reason = event.finish_reason
            output.stop_reason = self._stop_reason(event.stop_reason)

    def _stop_reason(self, said: str) -> str | int | None:
        if not said or said in self._stop:
            return said or None
        return self._special_stops.get(int(said), int(said))
