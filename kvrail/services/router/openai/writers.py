"""How an answer is written: what every API does with the updates of a generation."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Protocol

from kvrail.errors import KvrailError
from kvrail.services.router.errors import to_http
from kvrail.services.router.openai.events import DONE, MARK, TextEvent, encode_event, is_plain
from kvrail.services.router.openai.logprobs import TokenTexts
from kvrail.services.router.openai.usage import usage_so_far
from kvrail.services.router.plan.translate import Plan
from kvrail.services.router.schema import Request
from kvrail.services.router.values import Delta, Drafted, Json, Scored, Settled, Update, Updates
from kvrail.text import Tokenizer


class Writer(Protocol):
    """One API.

    A stream is an opening, the events of each moment's updates, and a closing or a failure. A whole answer adds the
    updates up.
    """

    @property
    def greets(self) -> bool:
        """Whether the opening is sent with the headers, rather than with the first output."""

    def opening(self) -> bytes:
        """Events that go before the first output."""

    def events(self, updates: Updates) -> bytes:
        """Events of what came at one moment; empty where it has nothing to show."""

    def closing(self, usage: Json) -> bytes:
        """The last events; usage: as `final_usage` makes it."""

    def failure(self, error: KvrailError) -> bytes:
        """The last events of a stream that breaks off."""

    def add(self, update: Delta | Scored) -> None:
        """Collect new output, or log probabilities of a prompt where the API has them, for `whole`."""

    def whole(self, usage: Json) -> Json:
        """The response with all output that was added."""


def error_event(error: KvrailError) -> bytes:
    """An error in a stream of OpenAI's APIs."""
    return encode_event(to_http(error)[1])


@dataclass(frozen=True, slots=True)
class Head:
    """What every object of one response has; created: Unix seconds."""

    id: str
    created: int
    model: str
    system_fingerprint: str

    def envelope(self, kind: str, choices: list[Json]) -> Json:
        """An object of the API."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            "choices": choices,
        }

    def whole(self, kind: str, choices: list[Json]) -> Json:
        """A whole response, with the further keys that OpenAI's and vLLM's have."""
        return {**self.envelope(kind, choices), "service_tier": "default", "kv_transfer_params": None}


_UNENDED: Json = {"finish_reason": None}


class ChunkWriter(ABC):
    """One of the two APIs whose streams are chunks of one shape, with the usage that the stream's options ask for.

    kind: of a chunk. silent: what a choice without output has there.
    """

    greets = False  # clients take the first chunk's time for that of the first token
    kind: ClassVar[str]
    silent: ClassVar[Json]

    def __init__(self, head: Head, tokenizer: Tokenizer, request: Request, plan: Plan, *, simple: bool = True) -> None:
        """simple: whether chunks that bring text alone differ only in that text."""
        self._head = head
        self._texts = TokenTexts(
            tokenizer,
            as_ids=bool(request.return_tokens_as_token_ids),
            all_listed=request.logprob_token_ids is not None,
        )
        self._plan = plan
        self._include_usage = request.include_usage  # in a last chunk
        self._continuous_usage = request.continuous_usage  # what it is so far, in each chunk
        self._simple = simple and not request.return_token_ids and not self._continuous_usage
        self._tokens = 0
        self._text_events: dict[int, TextEvent] = {}  # by choice

    @abstractmethod
    def first_chunks(self) -> list[Json]:
        """Chunks that go before the first output."""

    @abstractmethod
    def chunk(self, delta: Delta) -> Json | None:
        """The chunk for new output; None where it is held back and there is nothing else to send."""

    def scored_chunk(self, scored: Scored) -> Json | None:
        """The chunk with log probabilities of a prompt; None where a stream shows none."""
        return None

    def opening(self) -> bytes:
        """Each choice's role, or its echoed prompt."""
        return b"".join(map(encode_event, self.first_chunks()))

    def events(self, updates: Updates) -> bytes:
        """A chunk for each update."""
        return b"".join(map(self._event, updates))

    def closing(self, usage: Json) -> bytes:
        """The usage, if asked for, and [DONE]."""
        last = {**self._head.envelope(self.kind, []), "usage": usage}
        return (encode_event(last) if self._include_usage else b"") + DONE

    def failure(self, error: KvrailError) -> bytes:
        """The error object; clients know by the missing [DONE] too."""
        return error_event(error)

    def _event(self, update: Update) -> bytes:
        if isinstance(update, Delta):
            self._tokens += len(update.token_ids)
            if self._simple and is_plain(update):
                event = self._text_events.get(update.index)
                if event is None:
                    chunk = self.chunk(Delta(update.index, MARK, (), (), None, None))
                    assert chunk is not None, "a chunk shows its text"
                    event = self._text_events[update.index] = TextEvent(chunk)
                return event.encode(update.text)
            shown = self.chunk(update)
        elif isinstance(update, Scored):
            shown = self.scored_chunk(update)
        else:  # drafts: a chunk without output, and the member `kvrail`
            shown = {**self._chunk(update.index, self.silent), "kvrail": _draft_member(update)}
        return b"" if shown is None else encode_event(shown)

    def _chunk(
        self, index: int, output: Json, logprobs: Json | None = None, end: Json = _UNENDED, **more: list[int]
    ) -> Json:
        """A chunk of one choice."""
        chunk = self._head.envelope(self.kind, [{"index": index, **output, "logprobs": logprobs, **end, **more}])
        if self._continuous_usage:
            chunk["usage"] = usage_so_far(self._plan, self._tokens)
        elif self._include_usage:
            chunk["usage"] = None
        return chunk


def _draft_member(news: Drafted | Settled) -> Json:
    """The member `kvrail` of a chunk that reports drafts (docs/provisional-streaming.md)."""
    if isinstance(news, Drafted):
        place = {"index": news.index, "position": news.position}
        return {"provisional": {**place, "tokens": len(news.token_ids), "text": news.text}}
    member: Json = {}
    if news.accepted:
        member["confirm"] = {"index": news.index, "position": news.position, "tokens": news.accepted}
    if news.accepted < news.proposed:
        member["retract"] = {"index": news.index, "position": news.position + news.accepted}
    return member
