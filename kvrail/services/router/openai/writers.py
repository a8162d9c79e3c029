"""How an answer is written: what every API does with the updates of a generation."""

from typing import Protocol

from kvrail.errors import KvrailError
from kvrail.services.router.errors import to_http
from kvrail.services.router.openai.events import DONE, MARK, TextEvent, encode_event, is_plain
from kvrail.services.router.openai.formats import Format
from kvrail.services.router.openai.usage import usage_so_far
from kvrail.services.router.plan.translate import Plan
from kvrail.services.router.schema import Request
from kvrail.services.router.values import Delta, Json, Scored, Update, Updates


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


class ChunkWriter:
    """OpenAI's older APIs: a stream is chunks of one shape, with the usage that its options ask for."""

    greets = False  # clients take the first chunk's time for that of the first token

    def __init__(self, form: Format, request: Request, plan: Plan) -> None:
        self._form = form
        self.add = form.add
        self._plan = plan
        self._include_usage = request.include_usage  # in a last chunk
        self._continuous_usage = request.continuous_usage  # what it is so far, in each chunk
        self._tokens = 0
        self._texts: dict[int, TextEvent] = {}  # by choice

    def opening(self) -> bytes:
        """Each choice's role, or its echoed prompt."""
        return b"".join(encode_event(self._with_usage(chunk)) for chunk in self._form.opening())

    def events(self, updates: Updates) -> bytes:
        """A chunk for each update."""
        return b"".join(map(self._event, updates))

    def _event(self, update: Update) -> bytes:
        if isinstance(update, Delta):
            self._tokens += len(update.token_ids)
            if not self._continuous_usage and self._form.simple and is_plain(update):
                event = self._texts.get(update.index)
                if event is None:
                    chunk = self._chunk(Delta(update.index, MARK, (), (), None, None))
                    assert chunk is not None, "a chunk shows its text"
                    event = self._texts[update.index] = TextEvent(chunk)
                return event.encode(update.text)
        chunk = self._chunk(update)
        return b"" if chunk is None else encode_event(chunk)

    def _chunk(self, update: Update) -> Json | None:
        """The chunk for an update; None where it has nothing to show."""
        if isinstance(update, Delta):
            shown = self._form.chunk(update)
        elif isinstance(update, Scored):
            shown = self._form.scored_chunk(update)
        else:
            shown = self._form.draft_chunk(update)
        return None if shown is None else self._with_usage(shown)

    def _with_usage(self, chunk: Json) -> Json:
        """Add the usage field that the stream options ask for."""
        if self._continuous_usage:
            chunk["usage"] = usage_so_far(self._plan, self._tokens)
        elif self._include_usage:
            chunk["usage"] = None
        return chunk

    def closing(self, usage: Json) -> bytes:
        """The usage, if asked for, and [DONE]."""
        return (encode_event({**self._form.last(), "usage": usage}) if self._include_usage else b"") + DONE

    def failure(self, error: KvrailError) -> bytes:
        """The error object; clients know by the missing [DONE] too."""
        return error_event(error)

    def whole(self, usage: Json) -> Json:
        """The whole response."""
        return {**self._form.whole(), "usage": usage}
