"""The measurements of one request, from its first byte to its last."""

import logging
import time
from typing import Any

from kvrail.runtime.logs import exemplar
from kvrail.services.router.generate.generation import Generation
from kvrail.services.router.values import Delta, Drafted, Updates
from kvrail.telemetry.moments import Moment, Timeline
from kvrail.telemetry.router import COUNTED_TOKENS, RouterMetrics
from kvrail.values.sampling import FinishReason

log = logging.getLogger("kvrail.router.observe")


class RequestRecord:
    """Gauges and counters of one admitted request. `close` must follow, whatever happens.

    provisional: whether the client sees drafts. outcome: if it is answered; "length" where any choice is cut off.
    """

    def __init__(self, metrics: RouterMetrics, timeline: Timeline, *, provisional: bool) -> None:
        self._metrics = metrics
        self._timeline = timeline
        self.first_token_s: float | None = None
        self._first: dict[int, float] = {}  # of each choice, when its first token came and when its last
        self._last: dict[int, float] = {}
        self._verified: dict[int, int] = {}  # tokens of each choice
        self._shown: dict[int, int] | None = {} if provisional else None  # the same, drafts included
        self.completion_tokens = 0
        self.outcome = "stop"
        if provisional:
            metrics.expect_tokens("provisional")
        metrics.waiting.inc()

    def take(self, updates: Updates) -> None:
        """Take note of what came at one moment; a choice's tokens among it share the time since its last ones."""
        tokens: dict[int, int] = {}
        for update in updates:
            if isinstance(update, Delta):
                if count := len(update.token_ids):
                    tokens[update.index] = tokens.get(update.index, 0) + count
                if update.finish_reason is FinishReason.LENGTH:
                    self.outcome = "length"
            elif isinstance(update, Drafted):
                self._reached("provisional", self._shown, update.index, update.position + len(update.token_ids))
        if tokens:
            now = time.perf_counter()
            if self.first_token_s is None:
                self._begun()
            for index, count in tokens.items():
                self._came(index, count, now)

    def _begun(self) -> None:
        """Take note of the first token."""
        self.first_token_s = self._timeline.elapsed()
        self._metrics.time_to_first_token.observe(self.first_token_s, example=exemplar())
        self._metrics.waiting.dec()
        self._metrics.running.inc()

    def _came(self, index: int, count: int, now: float) -> None:
        """Take note of a choice's `count` new tokens."""
        before = self._verified.get(index, 0)
        if before < COUNTED_TOKENS[-1]:
            self._reached("verified", self._verified, index, before + count)
            self._reached("provisional", self._shown, index, before + count)
        self._verified[index] = before + count
        last = self._last.get(index)
        self._last[index] = now
        if last is not None:
            self._metrics.inter_token.observe((now - last) / count, count)
        else:
            self._first[index] = now
            if count > 1:
                self._metrics.inter_token.observe(0.0, count - 1)  # the first token has none before it
        self.completion_tokens += count
        self._metrics.generation_tokens.inc(count)

    def _reached(self, kind: str, counts: dict[int, int] | None, index: int, count: int) -> None:
        """A choice has `count` tokens now; observe those numbers of tokens that it did not have before."""
        if counts is None:
            return
        before = counts.get(index, 0)
        counts[index] = max(before, count)
        for k in COUNTED_TOKENS:
            if before < k <= count:
                self._metrics.time_to_token(k, kind).observe(self._timeline.elapsed())

    def close(self, outcome: str, generation: Generation | None) -> tuple[int, int]:
        """Take note of the end: the last byte has left, or the client has. Returns prompt and generated tokens."""
        metrics = self._metrics
        (metrics.waiting if self.first_token_s is None else metrics.running).dec()
        metrics.outcomes[outcome].inc()
        total = self._timeline.mark(Moment.RESPONDED)
        prompt_tokens = 0 if generation is None else generation.plan.prompt_tokens
        if outcome in ("stop", "length") and generation is not None:
            metrics.request_seconds.observe(total, example=exemplar())
            for name, seconds in self._timeline.parts().items():
                metrics.stage_seconds[name].observe(seconds)
            self._observe_phases()
            self._observe_tokens(generation)
        first = "-" if self.first_token_s is None else f"{self.first_token_s:.3f} s"
        log.info(
            "%s: %d prompt and %d generated tokens, first token %s, total %.3f s",
            outcome,
            prompt_tokens,
            self.completion_tokens,
            first,
            total,
            extra={"fields": self._fields(outcome, prompt_tokens, total)},
        )
        return prompt_tokens, self.completion_tokens

    def _fields(self, outcome: str, prompt_tokens: int, total: float) -> dict[str, Any]:
        """What a JSON log line has of the request, times in seconds."""
        first = self.first_token_s
        return {
            "outcome": outcome,
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "first_token_s": None if first is None else round(first, 6),
            "total_s": round(total, 6),
            "parts_s": {name: round(seconds, 6) for name, seconds in self._timeline.parts().items()},
        }

    def _observe_tokens(self, generation: Generation) -> None:
        """Count an answered request's tokens, and what it asked for."""
        metrics, plan = self._metrics, generation.plan
        metrics.prompt_tokens.inc(plan.prompt_tokens)
        for summary in generation.summaries:
            cached = min(summary.cached_tokens, summary.prompt_tokens)
            metrics.cached_tokens.inc(summary.cached_tokens)
            metrics.prompt_tokens_by_source["cached"].inc(cached)
            source = "transferred" if summary.prefill_worker else "computed"
            metrics.prompt_tokens_by_source[source].inc(summary.prompt_tokens - cached)
        metrics.request_prompt_tokens.observe(plan.prompt_tokens)
        metrics.request_generation_tokens.observe(self.completion_tokens)
        metrics.longest_generation_tokens.observe(max(self._verified.values(), default=0))
        metrics.request_sequences.observe(plan.n)
        metrics.request_max_tokens.observe(plan.sampling[0].max_tokens)
        for index, count in self._verified.items():
            metrics.time_per_token.observe((self._last[index] - self._first[index]) / max(1, count - 1))

    def _observe_phases(self) -> None:
        """Observe the phases that vLLM knows; each needs the marks at both its ends."""
        moments = [
            self._timeline.get(moment)
            for moment in (Moment.RECEIVED, Moment.PREFILL_STARTED, Moment.FIRST_TOKEN, Moment.FINISHED)
        ]
        for phase, begin, end in zip(("queue", "prefill", "decode"), moments, moments[1:], strict=False):
            if begin is not None and end is not None:
                self._metrics.phase_seconds[phase].observe(max(0.0, end - begin))
        began, ended = moments[1], moments[-1]
        if began is not None and ended is not None:
            self._metrics.inference_seconds.observe(max(0.0, ended - began))
