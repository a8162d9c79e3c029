"""The engine as it is, over a machine without a model, stepped by hand."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from prometheus_client import CollectorRegistry

from kvrail.engine.engine import Engine
from kvrail.engine.kv.pages import PagePool
from kvrail.engine.request.events import (
    Delivery,
    Event,
    Failed,
    Finished,
    LayerListener,
    Output,
    PromptScored,
)
from kvrail.engine.request.requests import ModelLimits
from kvrail.engine.sampling.sampler import Sampler
from kvrail.engine.schedule.chunks import StepBudget
from kvrail.engine.schedule.scheduler import Scheduler
from kvrail.engine.step.closing import PageCloser
from kvrail.errors import KvrailError
from kvrail.telemetry.worker import EngineMetrics
from kvrail.text import Tokenizer
from kvrail.values.sampling import FinishReason, TokenLogprobs
from tests.engine.mixes.captured import CapturedMachine
from tests.engine.mixes.machine import EOS, VOCAB, TokenMachine, Trouble, cells_of


@dataclass(frozen=True)
class Setting:
    """How an engine is set up. opened: pages that can be open at once, where full pages are closed.

    context: the model's longest sequence; breaks: how likely a step raises.
    """

    form: str
    page_size: int
    pages: int
    opened: int
    context: int
    limits: Mapping[str, int]
    ahead: bool = False
    prefix_cache: bool = False
    max_drafts: int = 0
    breaks: float = 0.0
    seed: int = 0


class Site:
    """An engine and all that it has told."""

    def __init__(self, setting: Setting, tokenizer: Tokenizer, listener: LayerListener | None = None) -> None:
        limits = {"max_waiting": 500, **setting.limits}
        self.trouble = Trouble(setting.breaks, setting.seed)
        most = {"most_slices": limits["max_running"], "most_tokens": limits["max_batch_tokens"]}
        pages = setting.pages, setting.page_size
        machine: CapturedMachine | TokenMachine
        if setting.form == "captured":
            machine = CapturedMachine(*pages, self.trouble, **most)
        else:
            cells = cells_of(setting.form, *pages, setting.opened, setting.seed)
            machine = TokenMachine(setting.form, cells, setting.page_size, self.trouble, ahead=setting.ahead, **most)
        self.cells = cast(Any, machine.cells)
        slots = getattr(self.cells, "slots", None)  # where full pages are closed
        self.pool = PagePool(setting.pages, setting.page_size, prefix_cache=setting.prefix_cache, slots=slots)
        self.scheduler = Scheduler(self.pool, StepBudget(**limits))
        self.events: dict[str, list[Event]] = {}
        self._of: dict[tuple[str, type], list[Any]] = {}
        self.heard = 0  # events
        self.poisoned = False  # by what another worker sent
        self.engine = Engine(
            cast(Any, machine),
            Sampler(VOCAB, torch.device("cpu")),
            self.scheduler,
            ModelLimits(VOCAB, setting.context, frozenset([EOS])),
            tokenizer,
            EngineMetrics(CollectorRegistry(), "machine"),
            self._deliver,
            listener,
            setting.max_drafts,
            None if slots is None else PageCloser(self.pool, self.cells),
        )

    def of(self, name: str, kind: type) -> list[Any]:
        """A request's events of one kind."""
        return self._of.get((name, kind), [])

    def forget(self) -> None:
        """Forget all events."""
        self.events.clear()
        self._of.clear()

    def close(self) -> None:
        self.engine._masks.close()

    def _deliver(self, events: Delivery) -> None:
        for name, event in events:
            self.events.setdefault(name, []).append(event)
            self._of.setdefault((name, type(event)), []).append(event)
        self.heard += len(events)


@dataclass
class Answer:
    """What a client has of a request: of each sequence tokens, pieces of text, log probabilities and the end.

    prompt: of each scored token of the prompt its place, log probability, rank and the most likely ones.
    """

    tokens: list[list[int]]
    pieces: list[list[str]]
    logprobs: list[list[TokenLogprobs]]
    ends: list[tuple[FinishReason, str] | None]
    prompt: list[tuple[Any, ...]] = field(default_factory=list)
    failed: KvrailError | None = None
    finished: int | None = None


def answer_of(site: Site, name: str, n: int) -> Answer:
    """A request's answer. Raises AssertionError if its events come in an order that is not one."""
    answer = Answer([[] for _ in range(n)], [[] for _ in range(n)], [[] for _ in range(n)], [None] * n)
    for event in site.events.get(name, []):
        assert answer.finished is None and answer.failed is None, f"{event} behind the end"
        if isinstance(event, Output):
            assert answer.ends[event.index] is None, "output behind a sequence's end"
            answer.tokens[event.index] += event.token_ids
            answer.pieces[event.index].append(event.text)
            answer.logprobs[event.index] += event.logprobs
            if event.finish_reason is not None:
                answer.ends[event.index] = event.finish_reason, event.stop_reason
        elif isinstance(event, PromptScored):
            assert not any(answer.tokens), "scores of the prompt behind output"
            found = event.logprobs
            for place, (logprob, rank) in enumerate(zip(found.logprobs, found.ranks, strict=True)):
                answer.prompt.append((found.first + place, logprob, rank, tuple(found.most_likely(place))))
        elif isinstance(event, Failed):
            answer.failed = event.error
        elif isinstance(event, Finished):
            answer.finished = event.completion_tokens
    return answer
