"""What /v1/messages and the path below it do."""

from typing import Any

from starlette.datastructures import State

from kvrail.services.router.answer.answer import Answer
from kvrail.services.router.answer.service import RouterService
from kvrail.services.router.messages.schema import MessagesRequest, Prompted
from kvrail.services.router.messages.translate import chat_request
from kvrail.services.router.messages.writer import MessageWriter, failure_event
from kvrail.services.router.openai.renaming import renamed
from kvrail.services.router.plan.translate import Plan


class Messages:
    """The API over the router's one way to answer."""

    def __init__(self, service: RouterService) -> None:
        self._service = service

    def create(self, request: MessagesRequest, state: State) -> Answer:
        """Answer /v1/messages."""
        chat, rename = chat_request(request)

        def write(plan: Plan, name: str) -> MessageWriter:
            return MessageWriter(f"msg_{state.wire_id}", name, plan.prompt_tokens, plan.new_reader())

        planner = self._service.planner
        return self._service.answer(
            chat, 1, state, lambda: renamed(planner.chat(chat, state.client), rename), write, failure_event
        )

    async def count(self, request: Prompted, client: str) -> dict[str, Any]:
        """Answer /v1/messages/count_tokens."""
        self._service.check_model(request.model)
        chat, rename = chat_request(request)
        with self._service.admission.admitted(1, client):
            return {"input_tokens": await renamed(self._service.planner.count(chat, client), rename)}
