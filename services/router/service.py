"""The router's parts put together, and the story of one request told with them."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import prometheus_client
from starlette.datastructures import State

from kvrail.config import RouterSettings
from kvrail.errors import InvalidRequestError, ModelNotFoundError
from kvrail.metrics import RouterMetrics
from kvrail.text import Tokenizer
from services.router.admission import Admission
from services.router.answer import Answer, Job, Prepared
from services.router.formats import ChatFormat, CompletionFormat, Format, Head
from services.router.generation import Generation
from services.router.schema import ChatRequest, CompletionRequest, DetokenizeRequest, Request, TokenizeRequest
from services.router.translate import Plan, Planner, encode_chat
from services.router.workers import WorkerPool


class RouterService:
    """Everything that outlives a request. Make it inside the event loop: channels belong to one."""

    def __init__(self, settings: RouterSettings, tokenizer: Tokenizer) -> None:
        self.settings = settings
        self.model = settings.model_name
        self.registry = prometheus_client.CollectorRegistry()
        self.metrics = RouterMetrics(self.registry, self.model)
        self.pool = WorkerPool(settings, self.metrics)
        self.admission = Admission(settings.max_concurrent_requests)
        self._tokenizer = tokenizer
        self._planner = Planner(tokenizer, self.pool.limits)
        self._started = int(time.time())

    def check_model(self, name: str | None) -> None:
        """Raise ModelNotFoundError where a request names another model than the one served."""
        if name is not None and name != self.model:
            raise ModelNotFoundError(f"the model {name[:200]!r} does not exist; this server has {self.model!r}")

    def chat(self, request: ChatRequest, state: State) -> Answer:
        """Answer /v1/chat/completions."""

        def show(plan: Plan) -> Format:
            head = self._head("chatcmpl", state.request_id)
            return ChatFormat(head, self._tokenizer, choices=plan.n, logprobs=bool(request.logprobs))

        return self._answer(request, 1, state, lambda: self._planner.chat(request), show)

    def complete(self, request: CompletionRequest, state: State) -> Answer:
        """Answer /v1/completions."""

        def show(plan: Plan) -> Format:
            head = self._head("cmpl", state.request_id)
            prefixes = [prefix for prefix in plan.prefixes for _ in range(plan.n)]
            return CompletionFormat(head, self._tokenizer, prefixes=prefixes, logprobs=request.logprobs is not None)

        prompts = len(request.prompt)
        if prompts > self.settings.max_concurrent_requests:
            limit = self.settings.max_concurrent_requests
            raise InvalidRequestError(
                f"prompt: {prompts} prompts are more than the {limit} requests that this server runs at once; "
                "send them in several requests",
                param="prompt",
            )
        return self._answer(request, prompts, state, lambda: self._planner.completion(request), show)

    def _head(self, prefix: str, request_id: str) -> Head:
        return Head(f"{prefix}-{request_id}", int(time.time()), self.model, f"fp_{self.pool.fingerprint[:12]}")

    def _answer(
        self,
        request: Request,
        prompts: int,
        state: State,
        plan_request: Callable[[], Awaitable[Plan]],
        show: Callable[[Plan], Format],
    ) -> Answer:
        async def prepare() -> Prepared:
            self.check_model(request.model)
            await self.pool.settle()
            plan = await plan_request()
            generation = Generation(
                plan,
                state.wire_id,
                model=self.model,
                pool=self.pool,
                metrics=self.metrics,
                timeline=state.timeline,
                timeout_s=self.settings.request_timeout_s,
            )
            return Prepared(generation, show(plan))

        return Answer(Job(request, prompts, state.timeline, prepare), self.admission, self.metrics)

    async def tokenize(self, request: TokenizeRequest) -> dict[str, Any]:
        """Answer /tokenize."""
        self.check_model(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise InvalidRequestError("prompt: send either prompt or messages", param="prompt")
        if request.prompt is None:
            tokens = await encode_chat(self._tokenizer, request)
        else:
            special = request.add_special_tokens is not False
            tokens = await asyncio.to_thread(self._tokenizer.encode, request.prompt, add_special_tokens=special)
        answer: dict[str, Any] = {"count": len(tokens), "max_model_len": self.max_model_len(), "tokens": tokens}
        if request.return_token_strs:
            answer["token_strs"] = [self._tokenizer.token_text(token_id) for token_id in tokens]
        return answer

    async def detokenize(self, request: DetokenizeRequest) -> dict[str, Any]:
        """Answer /detokenize."""
        self.check_model(request.model)
        largest = max(request.tokens, default=0)
        if largest >= self._tokenizer.vocab_size:
            raise InvalidRequestError(
                f"tokens: token id {largest} is not in the vocabulary of {self._tokenizer.vocab_size}", param="tokens"
            )
        text = await asyncio.to_thread(self._tokenizer.decode, request.tokens, skip_special_tokens=False)
        return {"prompt": text}

    def max_model_len(self) -> int | None:
        """Context length in tokens; None while no decode worker takes requests."""
        return self.pool.limits().context if self.pool.healthy else None

    def card(self) -> dict[str, Any]:
        """The served model as /v1/models shows it."""
        return {
            "id": self.model,
            "object": "model",
            "created": self._started,
            "owned_by": "kvrail",
            "root": self.settings.model,
            "parent": None,
            "max_model_len": self.max_model_len(),
        }

    def health(self) -> tuple[int, dict[str, Any]]:
        """Status and body of /health: 200 only while requests can be served the way that was configured.

        degraded: they are served, but without a worker that was found once or that the start did not wait for any more.
        """
        pool = self.pool
        if self.admission.draining:
            word = "draining"
        elif pool.starting:
            word = "starting"
        elif pool.healthy:
            word = "ok" if pool.complete else "degraded"
        else:
            word = "unavailable"
        return 200 if word in ("ok", "degraded") else 503, {
            "status": word,
            "model": self.model,
            "fingerprint": self.pool.fingerprint or None,
            "active_requests": self.admission.active,
            "decode_workers": {target: worker.describe() for target, worker in self.pool.decode.items()},
            "prefill_workers": {target: worker.describe() for target, worker in self.pool.prefill.items()},
        }
