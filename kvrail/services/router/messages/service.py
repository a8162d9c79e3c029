"""The service behind /v1/messages and the path below it."""

from typing import Any

from starlette.datastructures import State

from kvrail.errors import KvrailError
from kvrail.services.router.answer.answer import Answer
from kvrail.services.router.answer.calls import ApiCall, Parts
from kvrail.services.router.answer.service import RouterService
from kvrail.services.router.messages.schema import MessagesRequest, Prompted
from kvrail.services.router.messages.translate import chat_request
from kvrail.services.router.messages.writer import MessageWriter, failure_event
from kvrail.services.router.openai.renaming import renamed
from kvrail.services.router.plan.translate import Plan
from kvrail.services.router.schema import ChatRequest


class MessagesCall(ApiCall):
    """/v1/messages."""

    request: ChatRequest

    def __init__(self, request: MessagesRequest, state: State, parts: Parts) -> None:
        chat, rename = chat_request(request)
        super().__init__(chat, state, parts, rename)

    def writer(self, plan: Plan) -> MessageWriter:
        """A message."""
        return MessageWriter(f"msg_{self.wire_id}", self.name, plan.prompt_tokens, plan.new_reader())

    def failure(self, error: KvrailError) -> bytes:
        """An error event."""
        return failure_event(error)


class Messages:
    """The API, on the way of answering that all APIs of the router share."""

    def __init__(self, service: RouterService) -> None:
        self._service = service

    def create(self, request: MessagesRequest, state: State) -> Answer:
        """Answer /v1/messages."""
        return Answer(self._service.handler, MessagesCall(request, state, self._service.parts))

    async def count(self, request: Prompted, client: str) -> dict[str, Any]:
        """Answer /v1/messages/count_tokens."""
        self._service.check_model(request.model)
        chat, rename = chat_request(request)
        with self._service.admission.admitted(1, client):
            return {"input_tokens": await renamed(self._service.planner.count(chat, client), rename)}
