"""What the engine reports: each request's events, up to Prefilled, Finished or Failed, and the layers of prefills."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvrail.engine.batch.batch import SampledToken
from kvrail.engine.request.requests import WrittenPages
from kvrail.errors import KvrailError
from kvrail.values.sampling import FinishReason, PromptLogprobs, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Admitted:
    """The prompt has pages.

    cached_tokens: leading tokens whose KV is in the pages already, or is copied there by the first step: whole pages,
    or all tokens but the last.
    awaits_kv: a transfer has to fill the others (`receive_kv` or `compute_here` ends the wait); from
    `receive_coarse_kv` on, the request drafts meanwhile.

    If it awaits KV or is prefill-only, a lease of its pages is ready for `Engine.claim_lease`.
    """

    cached_tokens: int
    awaits_kv: bool


@dataclass(frozen=True, slots=True)
class PrefillStarted:
    """The first chunk of the prompt is being computed here."""


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Log probabilities of the next tokens of the prompt; they come before the first Output."""

    logprobs: PromptLogprobs


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prefill-only request is done: the first token of each of its n sequences."""

    tokens: tuple[SampledToken, ...]


@dataclass(frozen=True, slots=True)
class Output:
    """New output of sequence `index`; `text` is held back while a stop string may still match."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None
    stop_reason: str


@dataclass(frozen=True, slots=True)
class Drafted:
    """Guesses of the next tokens of sequence `index`, made on a coarse form of the prompt's KV.

    They follow the drafts that were reported since its last Output or Verified. For provisional requests only.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Verified:
    """The outcome of the drafts of sequence `index`; the next Output begins with the accepted ones.

    proposed: drafts that were verified, or dropped unverified; fewer than were made if pages are short. accepted:
    leading drafts that the exact KV confirmed; the others are withdrawn. dropped: they were not verified.
    """

    index: int
    proposed: int
    accepted: int
    dropped: bool = False


@dataclass(frozen=True, slots=True)
class Recomputed:
    """KV that another worker sent, or that was cached, gave no finite logits: a sequence computes all its KV again."""


@dataclass(frozen=True, slots=True)
class Finished:
    """All n sequences have ended and their pages are back."""

    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ended in an error and its pages are back."""

    error: KvrailError


Event = (
    Admitted | PrefillStarted | PromptScored | Prefilled | Output | Drafted | Verified | Recomputed | Finished | Failed
)
Delivery = Sequence[tuple[str, Event]]
"""Events of several requests, in order, each with its request id."""


class LayerListener(Protocol):
    """Learns which pages a prefill completes, layer by layer. Called on the engine's thread; must not block."""

    def begin(self, written: Sequence[WrittenPages]) -> Callable[[int], None]:
        """A step begins that completes these pages of each layer.

        What is returned is called, as a runner's `on_layer`, with the last layer whose work is enqueued.
        """
        ...
