"""The router's parts put together, and the story of one request told with them."""

import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import prometheus_client
from starlette.datastructures import State

from kvrail.config import RouterSettings
from kvrail.errors import ModelNotFoundError
from kvrail.grammar import Grammars
from kvrail.metrics import RouterMetrics
from kvrail.text import Tokenizer
from services.router.admission import Admission
from services.router.answer import Answer, Job, Prepared
from services.router.dispatch import Dispatcher
from services.router.encoding import Encoder, refuse
from services.router.formats import ChatFormat, CompletionFormat, Format, Head
from services.router.generation import Generation
from services.router.schema import ChatRequest, CompletionRequest, DetokenizeRequest, Request, TokenizeRequest
from services.router.shaping import Shaper
from services.router.translate import Plan, Planner
from services.router.workers import WorkerPool


class RouterService:
    """Everything that outlives a request. Make it inside the event loop: channels belong to one."""

    def __init__(self, settings: RouterSettings, tokenizer: Tokenizer) -> None:
        self.settings = settings
        self.model = settings.model_name
        self.registry = prometheus_client.CollectorRegistry()
        self.metrics = RouterMetrics(self.registry, self.model)
        self.pool = WorkerPool(settings, self.metrics)
        self.dispatcher = Dispatcher(self.pool, self.metrics, settings.newcomer_share)
        self.admission = Admission(settings.max_concurrent_requests, settings.newcomer_share, self.dispatcher.pace)
        self._tokenizer = tokenizer
        self._encoder = Encoder(tokenizer)
        shaper = Shaper(tokenizer, Grammars(lambda: tokenizer), settings.tool_parser, settings.reasoning_parser)
        self._planner = Planner(self._encoder, shaper, self.pool.limits, priorities=settings.priorities)
        self._started = int(time.time())

    def check_model(self, name: str | None) -> None:
        """Raise ModelNotFoundError where a request names another model than the one served."""
        if name is not None and name != self.model:
            raise ModelNotFoundError(f"the model {name[:200]!r} does not exist; this server has {self.model!r}")

    def chat(self, request: ChatRequest, state: State) -> Answer:
        """Answer /v1/chat/completions."""

        def show(plan: Plan) -> Format:
            head = self._head("chatcmpl", state.request_id)
            return ChatFormat(
                head, self._tokenizer, choices=plan.n, logprobs=bool(request.logprobs), reader=plan.reader
            )

        return self._answer(request, 1, state, lambda: self._planner.chat(request), show)

    def complete(self, request: CompletionRequest, state: State) -> Answer:
        """Answer /v1/completions."""

        def show(plan: Plan) -> Format:
            head = self._head("cmpl", state.request_id)
            prefixes = [prefix for prefix in plan.prefixes for _ in range(plan.n)]
            return CompletionFormat(head, self._tokenizer, prefixes=prefixes, logprobs=request.logprobs is not None)

        return self._answer(request, len(request.prompt), state, lambda: self._planner.completion(request), show)

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
                client=state.client,
                dispatcher=self.dispatcher,
                pool=self.pool,
                metrics=self.metrics,
                timeline=state.timeline,
                timeout_s=self.settings.request_timeout_s,
            )
            return Prepared(generation, show(plan))

        sequences = prompts * (request.n or 1)
        most = self.admission.most
        if sequences > most:
            refuse(
                "n" if prompts == 1 else "prompt",
                f"{prompts} prompts of n = {request.n or 1} are {sequences} sequences, more than the {most} that "
                "one client may have at once; send them in several requests",
            )
        return Answer(Job(request, sequences, state.client, state.timeline, prepare), self.admission, self.metrics)

    async def tokenize(self, request: TokenizeRequest, client: str) -> bytes:
        """The JSON that answers /tokenize."""
        self.check_model(request.model)
        with self.admission.admitted(1, client):
            tokens = await self._encoder.tokenize(request)
            answer = {"count": len(tokens), "max_model_len": self.max_model_len()}
            members = [json.dumps(answer)[1:-1].encode()]
            lists = await self._encoder.listed(tokens, texts=bool(request.return_token_strs))
            members += [b'"%b": %b' % (name.encode(), text) for name, text in lists.items()]
        return b"{" + b", ".join(members) + b"}"

    async def detokenize(self, request: DetokenizeRequest, client: str) -> dict[str, Any]:
        """Answer /detokenize."""
        self.check_model(request.model)
        with self.admission.admitted(1, client):
            return {"prompt": await self._encoder.detokenize(request.tokens)}

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
