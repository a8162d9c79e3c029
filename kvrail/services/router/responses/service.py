"""The service behind /v1/responses and the paths below it."""

import time
from functools import partial
from typing import Any

from starlette.datastructures import State

from kvrail.errors import KvrailError
from kvrail.services.router.answer.answer import Answer
from kvrail.services.router.answer.calls import ApiCall, Parts
from kvrail.services.router.answer.service import RouterService
from kvrail.services.router.errors import ResponseCancelledError, refuse
from kvrail.services.router.openai.logprobs import TokenTexts
from kvrail.services.router.plan.defaults import Defaults
from kvrail.services.router.plan.translate import Plan
from kvrail.services.router.responses.schema import InputItem, ResponsesRequest
from kvrail.services.router.responses.store import Owner, ResponseStore
from kvrail.services.router.responses.translate import chat_request, input_items
from kvrail.services.router.responses.writer import ResponseWriter, failure_event
from kvrail.services.router.schema import ChatRequest
from kvrail.services.router.values import Json

MAX_PAGE = 100
REPEATED = {"frequency_penalty", "presence_penalty", "reasoning", "temperature", "text", "top_p"}
"""Fields of a request that its response repeats where they were given, and else by a default."""


class ResponsesCall(ApiCall):
    """/v1/responses."""

    request: ChatRequest

    def __init__(
        self, asked: ResponsesRequest, history: list[InputItem], state: State, parts: Parts, store: ResponseStore
    ) -> None:
        """asked: the request, with items in place of references. history: the items of the responses before it."""
        chat, rename = chat_request(asked, history)
        super().__init__(chat, state, parts, rename)
        self._asked, self._store, self._owner = asked, store, state.api_key
        self._items = [*history, *input_items(asked)]
        self._response_id = f"resp_{self.wire_id}"

    def writer(self, plan: Plan) -> ResponseWriter:
        """A response, which is kept unless the client asked not to."""
        response = _described(self._asked, self.parts.planner.defaults, self._response_id, self.name)
        if self._asked.store is not False:
            cancel = partial(self.cancellation.cancel, ResponseCancelledError("the response was cancelled"))
            self._store.begin(self._owner, self._items, response, cancel)
        texts = TokenTexts(self.parts.tokenizer) if self.request.logprobs else None
        return ResponseWriter(response, plan.new_reader(), texts, partial(self._store.update, self._owner))

    def failure(self, error: KvrailError) -> bytes:
        """An error event."""
        return failure_event(error)

    def left(self) -> None:
        """Keep the response as cancelled."""
        self._store.abandon(self._owner, self._response_id)


class Responses:
    """The API, on the way of answering that all APIs of the router share."""

    def __init__(self, service: RouterService) -> None:
        settings = service.settings
        self._service = service
        self._store = ResponseStore(settings.stored_responses_mib << 20)

    def create(self, request: ResponsesRequest, state: State) -> Answer:
        """Answer /v1/responses."""
        request, history = self._read(request, state.api_key)
        service = self._service
        return Answer(service.handler, ResponsesCall(request, history, state, service.parts, self._store))

    async def count(self, request: ResponsesRequest, state: State) -> Json:
        """Answer /v1/responses/input_tokens."""
        self._service.parts.served_name(request.model)
        chat, rename = chat_request(*self._read(request, state.api_key))
        counted = await self._service.count(state.client, chat, rename)
        return {"object": "response.input_tokens", "input_tokens": counted}

    def _read(self, request: ResponsesRequest, owner: Owner) -> tuple[ResponsesRequest, list[InputItem]]:
        """The request, with items in place of references to them, and the items before it."""
        previous = request.previous_response_id
        history = [] if previous is None else self._store.history(owner, previous)
        if isinstance(request.input, list):
            request = request.model_copy(update={"input": self._store.resolved(owner, request.input)})
        return request, history

    def read(self, response_id: str, state: State, *, stream: bool | None) -> Json:
        """A kept response."""
        if stream:
            refuse("stream", "a kept response is not streamed again; leave it out")
        return self._store.find(state.api_key, response_id).response

    def delete(self, response_id: str, state: State) -> Json:
        """Forget a response."""
        self._store.delete(state.api_key, response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    def cancel(self, response_id: str, state: State) -> Json:
        """End a response in progress."""
        return self._store.cancel(state.api_key, response_id)

    def items(self, response_id: str, state: State, *, limit: int, order: str, after: str | None) -> Json:
        """The input of a kept response, with that of the responses before it."""
        entry = self._store.find(state.api_key, response_id)
        listed = [_listed(response_id, place, item) for place, item in enumerate(entry.items)]
        if order == "desc":
            listed.reverse()
        begin = 0
        if after is not None:
            begin = next((i + 1 for i, item in enumerate(listed) if item["id"] == after), 0)
            if begin == 0:
                refuse("after", f"{after[:80]!r} is no item of this response")
        page = listed[begin : begin + limit]
        return {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": begin + limit < len(listed),
        }


def _listed(response_id: str, place: int, item: Any) -> Json:
    """An item of an input as it is listed: with an id, and with a message's text as a part."""
    listed: Json = {"id": f"{response_id}_{place}", **item.model_dump(exclude_none=True), "status": "completed"}
    if isinstance(listed.get("content"), str):
        kind = "output_text" if listed["role"] == "assistant" else "input_text"
        listed["content"] = [{"type": kind, "text": listed["content"]}]
    return listed


def _tool(tool: Json) -> Json:
    """A function as the response repeats it, with its defaults."""
    return {"description": None, "parameters": None, "strict": False, **tool}


def _described(request: ResponsesRequest, defaults: Defaults, response_id: str, name: str) -> Json:
    """The response as it begins: what was asked for, and no output."""
    given = request.model_dump(include=REPEATED, exclude_none=True, by_alias=True)
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": None,
        "metadata": request.metadata or {},
        "model": name,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "presence_penalty": given.get("presence_penalty", defaults.presence_penalty),
        "frequency_penalty": given.get("frequency_penalty", defaults.frequency_penalty),
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": given.get("reasoning", {}).get("effort"), "summary": None},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": request.store is not False,
        "temperature": given.get("temperature", defaults.temperature),
        "text": {"format": {"type": "text"}, **given.get("text", {})},
        "tool_choice": request.tool_choice or "auto",
        "tools": [_tool(tool) for tool in request.tools or ()],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": given.get("top_p", defaults.top_p),
        "truncation": request.truncation or "disabled",
        "usage": None,
        "user": request.user,
    }
