"""What the engine tells whoever asked: one event after another for each request, ending in Finished or Failed."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvrail.engine.batch.batch import SampledToken
from kvrail.errors import KvrailError
from kvrail.values.sampling import FinishReason, PromptLogprobs, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Admitted:
    """The prompt has pages.

    cached_tokens: leading tokens whose KV is in them already, or is copied there by the first step: whole pages, or all
    tokens but the last.
    awaits_kv: the engine waits for a transfer to fill the others (`receive_kv` or `compute_here` ends the wait); from
    `receive_coarse_kv` on it drafts meanwhile.

    Where it awaits KV or is prefill-only, a lease of its pages lies ready for `Engine.claim_lease`.
    """

    cached_tokens: int
    awaits_kv: bool


@dataclass(frozen=True, slots=True)
class PrefillStarted:
    """The first chunk of the prompt is being computed here."""


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Log probabilities of the next of the prompt's tokens; they come before the first Output."""

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

    They follow the drafts reported since its last Output or Verified. Only for provisional requests.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Verified:
    """What became of the drafts of sequence `index`; the next Output begins with the accepted ones.

    proposed: drafts that were verified, or dropped unverified; where pages are short, fewer than were made. accepted:
    how many of the first ones the exact KV confirmed; all others are withdrawn.
    """

    index: int
    proposed: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Recomputed:
    """KV that another worker sent, or that was cached, gave no finite logits: a sequence computes its own from now."""


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
