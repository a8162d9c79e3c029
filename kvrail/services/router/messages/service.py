"""What /v1/messages and the path below it do, on the way of answering that all APIs of the router share."""

from typing import Any

from starlette.datastructures import State

from kvrail.errors import KvrailError
from kvrail.services.router.answer.calls import ApiCall, Parts
from kvrail.services.router.answer.service import RouterService
from kvrail.services.router.messages.schema import MessagesRequest, Prompted
from kvrail.services.router.messages.translate import chat_request
from kvrail.services.router.messages.writer import MessageWriter, failure_event
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
        message_id, request_id = f"msg_{self.wire_id}", self.state.request_id
        return MessageWriter(message_id, self.name, plan.prompt_tokens, plan.new_reader(), request_id)

    def failure(self, error: KvrailError) -> bytes:
        """An error event."""
        return failure_event(error, self.state.request_id)


async def count(service: RouterService, request: Prompted, client: str) -> dict[str, Any]:
    """Answer /v1/messages/count_tokens."""
    service.parts.served_name(request.model)
    return {"input_tokens": await service.count(client, *chat_request(request))}
