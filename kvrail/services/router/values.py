"""The values of a generation, from a worker's replies to the answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvrail.telemetry.moments import Moment
from kvrail.telemetry.spans import Span
from kvrail.values.sampling import FinishReason, PromptLogprobs, TokenLogprobs
from kvrail.wire.v1 import decode_pb2

Json = dict[str, Any]
"""An object of an API, as it is read or written."""


SPENT = "tokens"
"""Key of a request's state: prompt and generated tokens that it took, once it has ended."""


@dataclass(frozen=True, slots=True)
class Delta:
    """New output of one choice; index: the number of the choice in the response."""

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs]
    finish_reason: FinishReason | None
    stop_reason: str | int | None  # the stop string or the token id that ended the choice, if one did


@dataclass(frozen=True, slots=True)
class Drafted:
    """Tokens that a choice will perhaps have, from `position` of its output on; only if the plan asks for them."""

    index: int
    position: int
    token_ids: Sequence[int]
    text: str


@dataclass(frozen=True, slots=True)
class Settled:
    """The verification of a choice's drafts, from `position` on: the first `accepted` of them are right."""

    index: int
    position: int
    proposed: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Scored:
    """Log probabilities of the next tokens of a choice's prompt, where the plan asks for them; before any Delta."""

    index: int
    logprobs: PromptLogprobs


Update = Delta | Drafted | Settled | Scored
"""One update of a generation; a Settled comes before the deltas that repeat what it accepted."""

Updates = Sequence[Update]
"""The updates that came at one moment, in order; never empty."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of one prompt's stream; offset: seconds from DISPATCHED to the worker's own zero.

    marks, spans: the summary's, on the worker's own clock.
    """

    summary: decode_pb2.GenerateSummary
    offset: float
    marks: Sequence[tuple[Moment, float]]
    spans: Sequence[Span]
