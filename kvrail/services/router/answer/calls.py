"""What each API does for a generation request: read it, and write its answer."""

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass

from starlette.datastructures import State

from kvrail.config.settings import RouterSettings
from kvrail.errors import KvrailError, ModelNotFoundError
from kvrail.services.router.answer.leaving import Cancellation
from kvrail.services.router.answer.trace import Operation
from kvrail.services.router.fleet.workers import WorkerPool
from kvrail.services.router.openai.formats import ChatWriter, CompletionWriter
from kvrail.services.router.openai.renaming import Rename
from kvrail.services.router.openai.writers import Head, Writer, error_event
from kvrail.services.router.plan.translate import Plan, Planner
from kvrail.services.router.schema import ChatRequest, CompletionRequest
from kvrail.telemetry.tracing import Hop
from kvrail.text import Tokenizer

MAX_NAME_CHARS = 200
"""Longest part of an unknown model's name that an error or a trace quotes."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of the router that calls read."""

    settings: RouterSettings
    tokenizer: Tokenizer
    planner: Planner
    pool: WorkerPool

    def served_name(self, name: str | None) -> str:
        """The name to answer under: the first one where a request names none, since one model is served.

        Raises ModelNotFoundError where it names another model.
        """
        settings = self.settings
        if not name:
            return settings.model_name
        if name not in settings.model_names:
            served = " and ".join(map(repr, settings.model_names))
            raise ModelNotFoundError(f"the model {name[:MAX_NAME_CHARS]!r} does not exist; this server has {served}")
        return name


class ApiCall(ABC):
    """One generation request of an API.

    request: as OpenAI's older APIs have it. rename: what the API calls a parameter of it. name: the model's, to answer
    under, once `check_model` has passed. trace: None if none is recorded. cancellation: there once the work begins.
    """

    operation: Operation = "chat"
    cancellation: Cancellation

    def __init__(
        self, request: ChatRequest | CompletionRequest, state: State, parts: Parts, rename: Rename = str
    ) -> None:
        """state: of the HTTP request, as the middleware sets it."""
        self.request = request
        self.rename = rename
        self.state = state
        self.client: str = state.client
        self.wire_id: str = state.wire_id
        self.timeline = state.timeline
        self.provisional = bool(request.kvrail and request.kvrail.provisional)
        self.trace: Hop | None = None
        self.name = ""
        self.parts = parts

    @property
    def prompts(self) -> int:
        """Prompts of the request."""
        return 1

    @property
    def sequences(self) -> int:
        """Sequences that the request generates."""
        return self.prompts * (self.request.n or 1)

    def check_model(self) -> None:
        """Raise ModelNotFoundError if the model is not served, or not for the client's API key."""
        self.name, key = self.parts.served_name(self.request.model), self.state.key
        if key is not None and not key.may_ask_for(self.name):
            raise ModelNotFoundError(f"the API key {key.name!r} is not for the model {self.name!r}; ask for another")

    @abstractmethod
    def writer(self, plan: Plan) -> Writer:
        """What writes the answer."""

    def head(self, prefix: str) -> Head:
        """What every object of OpenAI's older APIs begins with."""
        fingerprint = f"fp_{self.parts.pool.fingerprint[:12]}"
        return Head(f"{prefix}-{self.state.request_id}", int(time.time()), self.name, fingerprint)

    def failure(self, error: KvrailError) -> bytes:
        """The last event of a stream that fails before it has a writer."""
        return error_event(error)

    def left(self) -> None:  # noqa: B027 - most APIs keep nothing
        """The client has left before the end."""


class ChatCall(ApiCall):
    """/v1/chat/completions."""

    request: ChatRequest

    def writer(self, plan: Plan) -> Writer:
        """Chunks of chat completions."""
        return ChatWriter(self.head("chatcmpl"), self.parts.tokenizer, self.request, plan)


class CompletionCall(ApiCall):
    """/v1/completions."""

    request: CompletionRequest
    operation: Operation = "text_completion"

    @property
    def prompts(self) -> int:
        """Prompts of the request."""
        return len(self.request.prompt)

    def writer(self, plan: Plan) -> Writer:
        """Chunks of completions."""
        return CompletionWriter(self.head("cmpl"), self.parts.tokenizer, self.request, plan)
