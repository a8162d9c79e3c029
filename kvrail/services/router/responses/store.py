"""Responses that are kept, so that clients can read them again and go on from them: bounded, the oldest make room."""

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter

from kvrail.errors import InvalidRequestError, ResponseNotFoundError
from kvrail.services.router.errors import refuse
from kvrail.services.router.responses.schema import InputItem, ItemReference
from kvrail.services.router.values import Json

_ITEMS = TypeAdapter(list[InputItem])
MAX_REFERENCED_BYTES = 8 << 20
"""Most bytes of the responses whose items one request refers to."""
ENTRY_BYTES = 16 << 10
"""Counted for a kept response beside its JSON: about what its parsed input items and its entry take."""
Owner = int | None
"""Which API key a response belongs to, by its place; None where there are no keys."""


@dataclass(slots=True)
class Entry:
    """A kept response.

    items: the input, with that of the responses before it; input_bytes: of its JSON. shown: JSON of the response as it
    was last, and status what that says. cancel: ends it; None where it has ended, since this holds all of it.
    """

    items: Sequence[InputItem]
    input_bytes: int
    shown: str
    status: str
    cancel: Callable[[], None] | None

    @property
    def response(self) -> Json:
        """The response as it was last."""
        response: Json = json.loads(self.shown)
        return response

    @property
    def size(self) -> int:
        """About what it takes in memory, in bytes."""
        return self.input_bytes + len(self.shown)


class ResponseStore:
    """Kept responses by owner and id; those of others are as if there were none."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._entries: OrderedDict[tuple[Owner, str], Entry] = OrderedDict()
        self.size = 0

    def __len__(self) -> int:
        return len(self._entries)

    def begin(self, owner: Owner, items: Sequence[InputItem], response: Json, cancel: Callable[[], None]) -> None:
        """Keep a response that begins."""
        size = sum(len(item.model_dump_json()) for item in items)
        entry = Entry(items, size, json.dumps(response), response["status"], cancel)
        self._entries[owner, response["id"]] = entry
        self.size += entry.size
        self._make_room()

    def update(self, owner: Owner, response: Json) -> None:
        """Take note of how a response ended, where it is still kept and was not cancelled."""
        entry = self._entries.get((owner, response["id"]))
        if entry is not None and entry.status != "cancelled":
            self._tell(entry, response)
            self._make_room()

    def abandon(self, owner: Owner, response_id: str) -> None:
        """Take note that the client of a response in progress has left."""
        entry = self._entries.get((owner, response_id))
        if entry is not None and entry.status == "in_progress":
            self._tell(entry, entry.response | {"status": "cancelled"})

    def _tell(self, entry: Entry, response: Json) -> None:
        """Take down how a response ended."""
        before = entry.size
        entry.shown, entry.status = json.dumps(response), response["status"]
        entry.cancel = None
        self.size += entry.size - before

    def _make_room(self) -> None:
        while self.size + ENTRY_BYTES * len(self._entries) > self._most_bytes:
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
        cancel = self.find(owner, response_id).cancel
        self._drop((owner, response_id))
        if cancel is not None:
            cancel()

    def cancel(self, owner: Owner, response_id: str) -> Json:
        """End a response in progress. Raises ResponseNotFoundError, or InvalidRequestError where it has ended."""
        entry = self.find(owner, response_id)
        cancel = entry.cancel
        if cancel is None:
            raise InvalidRequestError(f"response_id: this response is {entry.status}", param="response_id")
        response = entry.response | {"status": "cancelled"}
        self._tell(entry, response)
        cancel()
        return response

    def history(self, owner: Owner, response_id: str) -> list[InputItem]:
        """Input and output of a response and of those before it. Raises InvalidRequestError."""
        try:
            entry = self.find(owner, response_id)
        except ResponseNotFoundError as error:
            raise InvalidRequestError(f"previous_response_id: {error}", param="previous_response_id") from None
        if entry.status == "in_progress":
            why = "this response is still in progress; wait for its end"
            raise InvalidRequestError(f"previous_response_id: {why}", param="previous_response_id")
        return [*entry.items, *_ITEMS.validate_python(entry.response["output"])]

    def resolved(self, owner: Owner, items: Sequence[InputItem]) -> list[InputItem]:
        """The items, references replaced by what they name, each item once. Raises InvalidRequestError."""
        read: dict[str, dict[str, InputItem]] = {}
        return [
            self._referenced(owner, item.id, f"input.{place}.id", read) if isinstance(item, ItemReference) else item
            for place, item in enumerate(items)
        ]

    def _referenced(self, owner: Owner, item_id: str, param: str, read: dict[str, dict[str, InputItem]]) -> InputItem:
        """The item of an id, which has the response's id in it. read: items by id of responses that were read."""
        wire_id = item_id.partition("_")[2].rpartition("_")[0]
        entry = self._entries.get((owner, f"resp_{wire_id}"))
        if entry is not None and wire_id not in read:
            if sum(self._entries[owner, f"resp_{each}"].size for each in (*read, wire_id)) > MAX_REFERENCED_BYTES:
                refuse(param, f"the items come from more than {MAX_REFERENCED_BYTES} bytes; send the items themselves")
            output = entry.response["output"]
            read[wire_id] = {
                **{f"resp_{wire_id}_{place}": item for place, item in enumerate(entry.items)},
                **{each["id"]: item for each, item in zip(output, _ITEMS.validate_python(output), strict=True)},
            }
        found = read.get(wire_id, {}).pop(item_id, None)  # once, so that few bytes cannot ask for a huge prompt
        if found is None:
            refuse(param, f"no item {item_id[:80]!r} is kept here, or it was referred to before; send the item itself")
        return found

    def _drop(self, key: tuple[Owner, str]) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.size -= entry.size
