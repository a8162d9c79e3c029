"""The router's parts put together, and the story of one request told with them."""

import json
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from datetime import datetime
from functools import partial
from itertools import repeat
from typing import Any

from starlette.datastructures import State

from kvrail import __version__
from kvrail.config.settings import RouterSettings
from kvrail.errors import KvrailError, ModelNotFoundError
from kvrail.grammar import Checker
from kvrail.runtime.turns import Turns
from kvrail.security.tls import Tls
from kvrail.services.router.answer.admission import Admission
from kvrail.services.router.answer.answer import Answer, Job, Prepared, Speech
from kvrail.services.router.answer.trace import Operation, RequestTrace
from kvrail.services.router.errors import refuse
from kvrail.services.router.fleet.fleet import show_workers
from kvrail.services.router.fleet.workers import WorkerPool
from kvrail.services.router.generate.dispatch import Dispatcher
from kvrail.services.router.generate.generation import Generation
from kvrail.services.router.openai.formats import ChatFormat, CompletionFormat, Head
from kvrail.services.router.openai.logprobs import TokenTexts
from kvrail.services.router.openai.scored import ScoredPrompt
from kvrail.services.router.openai.writers import Writer, chunk_writer, error_event
from kvrail.services.router.plan.defaults import Defaults
from kvrail.services.router.plan.encoding import Encoder
from kvrail.services.router.plan.shaping import Shaper
from kvrail.services.router.plan.translate import Plan, Planner
from kvrail.services.router.schema import ChatRequest, CompletionRequest, DetokenizeRequest, Request, TokenizeRequest
from kvrail.telemetry.exposition import Exposition
from kvrail.telemetry.making import show_certificates, show_process
from kvrail.telemetry.router import RouterMetrics
from kvrail.telemetry.series import Registry
from kvrail.telemetry.tracing import Tracing
from kvrail.text import Tokenizer
from kvrail.wire import PROTOCOL_VERSION

MAX_NAME_CHARS = 200
"""Of a model that a client names and nobody serves, in an error and in a trace."""


class RouterService:
    """Everything that outlives a request. Make it inside the event loop: channels belong to one."""

    def __init__(
        self,
        settings: RouterSettings,
        tokenizer: Tokenizer,
        defaults: Defaults,
        tls: Tls | None,
        certificate_ends: Mapping[str, Callable[[], datetime]],
    ) -> None:
        """tls: towards workers. certificate_ends: of this process's certificates, by their use."""
        self.settings = settings
        self.model = settings.model_name
        self.registry = Registry()
        self.metrics = RouterMetrics(self.registry, self.model)
        show_process(self.registry, __version__, PROTOCOL_VERSION)
        self._look_at_certificates = show_certificates(self.registry, certificate_ends)
        self._exposition = Exposition(self.registry, settings.metrics_names)
        self.pool = WorkerPool(settings, self.metrics, tls)
        self.dispatcher = Dispatcher(self.pool, self.metrics, settings.newcomer_share, settings.prefill_wait_s)
        self.admission = Admission(settings.max_concurrent_requests, settings.newcomer_share, self.dispatcher.pace)
        self.tokenizer = tokenizer
        self._encoder = Encoder(tokenizer, trust_templates=settings.trust_request_chat_template)
        self.checker = Checker(tokenizer)
        shaper = Shaper(tokenizer, self.checker, settings.tool_parser, settings.reasoning_parser)
        self.planner = Planner(self._encoder, shaper, self.pool.limits, defaults, priorities=settings.priorities)
        self._speech = Speech(settings.stream_head_s, settings.keep_alive_s)
        self.tracing = Tracing.start(settings.otlp_endpoint, settings.table)
        self._writing = Turns()
        self._started = int(time.time())

    def check_model(self, name: str | None) -> str:
        """The name to answer under: the first one where a request names none, since one model is served.

        Raises ModelNotFoundError where it names another model.
        """
        if not name:
            return self.model
        if name not in self.settings.model_names:
            served = " and ".join(map(repr, self.settings.model_names))
            raise ModelNotFoundError(f"the model {name[:MAX_NAME_CHARS]!r} does not exist; this server has {served}")
        return name

    def chat(self, request: ChatRequest, state: State) -> Answer:
        """Answer /v1/chat/completions."""

        def write(plan: Plan, name: str) -> Writer:
            texts = self._texts(request)
            form = ChatFormat(
                self._head("chatcmpl", state.request_id, name),
                texts,
                choices=plan.n,
                logprobs=bool(request.logprobs),
                reader=plan.reader,
                reasoning=request.include_reasoning is not False,
                prompt_ids=plan.prompts[0] if request.return_token_ids else None,
                prompt=ScoredPrompt(texts, plan.prompts[0]) if plan.scores else None,
                prompt_top=request.prompt_logprobs or 0,
            )
            return chunk_writer(form, request, plan)

        return self.answer(request, 1, state, lambda: self.planner.chat(request, state.client), write)

    def _texts(self, request: Request) -> TokenTexts:
        return TokenTexts(
            self.tokenizer,
            as_ids=bool(request.return_tokens_as_token_ids),
            all_listed=request.logprob_token_ids is not None,
        )

    def complete(self, request: CompletionRequest, state: State) -> Answer:
        """Answer /v1/completions."""

        def write(plan: Plan, name: str) -> Writer:
            texts = self._texts(request)
            prompts = [ids for ids in plan.prompts for _ in range(plan.n)]
            prefixes = [prefix for prefix in plan.prefixes for _ in range(plan.n)]
            form = CompletionFormat(
                self._head("cmpl", state.request_id, name),
                texts,
                prefixes=prefixes,
                logprobs=request.logprobs is not None,
                prompt_ids=prompts if request.return_token_ids else None,
                prompts=list(map(ScoredPrompt, repeat(texts), prompts, prefixes)) if plan.scores else (),
                echo_top=request.logprobs if request.echo else None,
                prompt_top=request.prompt_logprobs,
            )
            return chunk_writer(form, request, plan)

        plan = partial(self.planner.completion, request, state.client)
        return self.answer(request, len(request.prompt), state, plan, write, operation="text_completion")

    def _head(self, prefix: str, request_id: str, name: str) -> Head:
        return Head(f"{prefix}-{request_id}", int(time.time()), name, f"fp_{self.pool.fingerprint[:12]}")

    def answer(
        self,
        request: Request,
        prompts: int,
        state: State,
        plan_request: Callable[[], Awaitable[Plan]],
        write: Callable[[Plan, str], Writer],
        failure: Callable[[KvrailError], bytes] = error_event,
        abandon: Callable[[], object] = lambda: None,
        operation: Operation = "chat",
    ) -> Answer:
        """The answer that plans, generates and writes; write: the writer of a plan, under a model's name."""

        async def prepare() -> Prepared:
            name = self.check_model(request.model)
            if state.key is not None and not state.key.may_ask_for(name):
                raise ModelNotFoundError(
                    f"the API key {state.key.name!r} is not for the model {name!r}; ask for another"
                )
            with trace.part("admit") if trace else nullcontext():
                await self.pool.settle()
            with trace.part("tokenise") if trace else nullcontext():
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
                trace_context=trace.context if trace else {},
            )
            return Prepared(generation, write(plan, name))

        sequences = prompts * (request.n or 1)
        most = self.admission.most
        if sequences > most:
            refuse(
                "n" if prompts == 1 else "prompt",
                f"{prompts} prompts of n = {request.n or 1} are {sequences} sequences, more than the {most} that "
                "one client may have at once; send them in several requests",
            )
        trace = self._trace(operation, request, state)
        job = Job(
            stream=bool(request.stream),
            provisional=bool(request.kvrail and request.kvrail.provisional),
            sequences=sequences,
            client=state.client,
            timeline=state.timeline,
            prepare=prepare,
            failure=failure,
            abandon=abandon,
            trace=trace,
        )
        return Answer(job, self.admission, self.metrics, self._speech, self._writing)

    def _trace(self, operation: Operation, request: Request, state: State) -> RequestTrace | None:
        if self.tracing is None:
            return None
        return RequestTrace.begin(
            self.tracing,
            operation,
            request,
            (request.model or self.model)[:MAX_NAME_CHARS],
            state.headers,
            state.request_id,
            state.timeline,
        )

    async def tokenize(self, request: TokenizeRequest, client: str) -> bytes:
        """The JSON that answers /tokenize."""
        self.check_model(request.model)
        with self.admission.admitted(1, client):
            tokens = await self._encoder.tokenize(request, client)
            answer = {"count": len(tokens), "max_model_len": self.max_model_len()}
            members = [json.dumps(answer)[1:-1].encode()]
            lists = await self._encoder.listed(tokens, client, texts=bool(request.return_token_strs))
            members += [b'"%b": %b' % (name.encode(), text) for name, text in lists.items()]
        return b"{" + b", ".join(members) + b"}"

    async def detokenize(self, request: DetokenizeRequest, client: str) -> dict[str, Any]:
        """Answer /detokenize."""
        self.check_model(request.model)
        with self.admission.admitted(1, client):
            return {"prompt": await self._encoder.detokenize(request.tokens, client)}

    def max_model_len(self) -> int | None:
        """Context length in tokens; None while no decode worker takes requests."""
        return self.pool.limits().context if self.pool.healthy else None

    def cards(self) -> list[dict[str, Any]]:
        """The served model under each of its names."""
        return [self.card(name) for name in self.settings.model_names]

    def card(self, name: str) -> dict[str, Any]:
        """The served model as /v1/models shows it."""
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "kvrail",
            "root": self.model,  # where the model lies on this machine is nothing for clients
            "parent": None,
            "max_model_len": self.max_model_len(),
        }

    def render_metrics(self, path: str, *, sums: bool) -> tuple[bytes, str]:
        """Body and content type of a metrics path. sums: with vLLM's names of decode workers' metrics, summed up."""
        show_workers(self.pool, self.metrics)
        self._look_at_certificates()
        return self._exposition.render(path, sums=sums)

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
            "decode_workers": self.pool.describe("decode"),
            "prefill_workers": self.pool.describe("prefill"),
            "dns": self.pool.names(),
        }
