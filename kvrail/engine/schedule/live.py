"""A request that an engine works on: what was asked for, and what has become of it so far."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvrail.engine.request.requests import EngineRequest
from kvrail.engine.request.sequence import Sequence as Seq
from kvrail.engine.schedule.output import SequenceText
from kvrail.engine.schedule.speculation import DraftText
from kvrail.values.pagehash import PageHash


@dataclass(slots=True)
class LiveRequest:
    """One request in the engine's books."""

    spec: EngineRequest
    hashes: Sequence[PageHash]
    unfinished: int
    sequences: list[Seq] = field(default_factory=list)
    texts: list[SequenceText | None] = field(default_factory=list)
    deferred: list[Seq] = field(default_factory=list)  # not queued before the prompt's KV is here
    coarse: bool = False  # the prompt's pages hold a coarse form of its KV
    draft_text: DraftText | None = None
    announced: bool = False
    prefill_started: bool = False
    completion_tokens: int = 0
