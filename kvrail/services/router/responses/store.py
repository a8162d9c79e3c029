"""Responses that are kept, so that clients can read them again and go on from them: bounded, the oldest make room."""

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from kvrail.errors import InvalidRequestError, ResponseNotFoundError
from kvrail.services.router.responses.schema import InputItem

Json = dict[str, Any]
_ITEMS = TypeAdapter(list[InputItem])
Owner = int | None
"""Which API key a response belongs to, by its place; None where there are no keys."""


@dataclass(slots=True)
class Entry:
    """A kept response.

    items: the input, with that of the responses before it. response: as it was told last. cancel: ends it while it is
    in progress. size: bytes of its JSON, about what it takes in memory.
    """

    items: Sequence[InputItem]
    response: Json
    cancel: Callable[[], None]
    size: int


class ResponseStore:
    """Kept responses by owner and id; those of others are as if there were none."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._entries: OrderedDict[tuple[Owner, str], Entry] = OrderedDict()
        self.size = 0

    def __len__(self) -> int:
        return len(self._entries)

    def begin(self, owner: Owner, items: Sequence[InputItem], response: Json, cancel: Callable[[], None]) -> None:
        """Keep a response that begins."""
        key = (owner, response["id"])
        told = json.dumps(response)
        size = len(told) + sum(len(item.model_dump_json()) for item in items)
        self._entries[key] = Entry(items, json.loads(told), cancel, size)
        self.size += size
        self._make_room()

    def update(self, owner: Owner, response: Json) -> None:
        """Take note of what has become of a response, where it is still kept and was not cancelled."""
        entry = self._entries.get((owner, response["id"]))
        if entry is None or entry.response["status"] == "cancelled":
            return
        told = json.dumps(response)
        grown = len(told) - len(json.dumps(entry.response))
        entry.response = json.loads(told)
        entry.size += grown
        self.size += grown
        self._make_room()

    def abandon(self, owner: Owner, response_id: str) -> None:
        """Take note that the client of a response in progress has left."""
        entry = self._entries.get((owner, response_id))
        if entry is not None and entry.response["status"] == "in_progress":
            entry.response["status"] = "cancelled"

    def _make_room(self) -> None:
        while len(self._entries) > self._most or self.size > self._most_bytes:
            self._drop(next(iter(self._entries)))

    def find(self, owner: Owner, response_id: str) -> Entry:
        """The entry. Raises ResponseNotFoundError."""
        entry = self._entries.get((owner, response_id))
        if entry is None:
            raise ResponseNotFoundError(
                f"no response {response_id[:80]!r} is kept here; it was made with store: false, has made room for "
                "newer ones, or is another key's"
            )
        return entry

    def delete(self, owner: Owner, response_id: str) -> None:
        """Forget a response; one in progress ends. Raises ResponseNotFoundError."""
        self.find(owner, response_id).cancel()
        self._drop((owner, response_id))

    def cancel(self, owner: Owner, response_id: str) -> Json:
        """End a response in progress. Raises ResponseNotFoundError, or InvalidRequestError where it has ended."""
        entry = self.find(owner, response_id)
        if entry.response["status"] != "in_progress":
            raise InvalidRequestError(f"response_id: this response is {entry.response['status']}", param="response_id")
        entry.response["status"] = "cancelled"
        entry.cancel()
        return entry.response

    def history(self, owner: Owner, response_id: str) -> list[InputItem]:
        """Input and output of a response and of those before it. Raises InvalidRequestError."""
        try:
            entry = self.find(owner, response_id)
        except ResponseNotFoundError as error:
            raise InvalidRequestError(f"previous_response_id: {error}", param="previous_response_id") from None
        if entry.response["status"] == "in_progress":
            why = "this response is still in progress; wait for its end"
            raise InvalidRequestError(f"previous_response_id: {why}", param="previous_response_id")
        return [*entry.items, *_ITEMS.validate_python(entry.response["output"])]

    def _drop(self, key: tuple[Owner, str]) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.size -= entry.size
