"""The router's parts, put together."""

import json
import math
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from kvrail import __version__
from kvrail.config.settings import RouterSettings
from kvrail.grammar import Checker
from kvrail.security.tls import Tls
from kvrail.services.router.answer.admission import Admission
from kvrail.services.router.answer.answer import RequestHandler
from kvrail.services.router.answer.calls import Parts
from kvrail.services.router.answer.recent import RecentRequests
from kvrail.services.router.fleet.fleet import show_workers
from kvrail.services.router.fleet.ways import Slo
from kvrail.services.router.fleet.workers import WorkerPool
from kvrail.services.router.generate.dispatch import Dispatcher
from kvrail.services.router.openai.renaming import Rename, renamed
from kvrail.services.router.plan.defaults import Defaults
from kvrail.services.router.plan.encoding import Encoder
from kvrail.services.router.plan.shaping import Shaper
from kvrail.services.router.plan.translate import Planner
from kvrail.services.router.schema import ChatRequest, DetokenizeRequest, TokenizeRequest
from kvrail.telemetry.exposition import Exposition
from kvrail.telemetry.making import show_certificates, show_process
from kvrail.telemetry.router import RouterMetrics
from kvrail.telemetry.series import Registry
from kvrail.telemetry.tracing import Tracing
from kvrail.text import Tokenizer
from kvrail.wire import PROTOCOL_VERSION


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
        self._exposition = Exposition(self.registry)
        self.pool = WorkerPool(settings, self.metrics, tls)
        slo = Slo(settings.slo_ttft_ms / 1e3, settings.slo_gap_ms / 1e3 or math.inf)
        self.dispatcher = Dispatcher(self.pool, self.metrics, settings.newcomer_share, settings.prefill_wait_s, slo)
        self.admission = Admission(settings.max_concurrent_requests, settings.newcomer_share, self.dispatcher.rate)
        self.tokenizer = tokenizer
        self._encoder = Encoder(tokenizer, trust_templates=settings.trust_request_chat_template)
        self.checker = Checker(tokenizer)
        shaper = Shaper(tokenizer, self.checker, settings.tool_parser, settings.reasoning_parser)
        self.planner = Planner(self._encoder, shaper, self.pool.limits, defaults, priorities=settings.priorities)
        self.parts = Parts(settings, tokenizer, self.planner, self.pool)
        self.recent = RecentRequests()
        self.tracing = Tracing.start(settings.otlp_endpoint, settings.table)
        self.handler = RequestHandler(
            settings, self.admission, self.dispatcher, self.metrics, self.recent, self.tracing
        )
        self._started = int(time.time())

    async def count(self, client: str, chat: ChatRequest, rename: Rename) -> int:
        """Tokens of a chat's prompt; rename: what another API calls the chat's parameters."""
        with self.admission.admitted(1, client), renamed(rename):
            return await self.planner.count(chat, client)

    async def tokenize(self, request: TokenizeRequest, client: str) -> bytes:
        """The JSON that answers /tokenize."""
        self.parts.served_name(request.model)
        with self.admission.admitted(1, client):
            tokens = await self._encoder.tokenize(request, client)
            answer = {"count": len(tokens), "max_model_len": self.max_model_len()}
            members = [json.dumps(answer)[1:-1].encode()]
            lists = await self._encoder.listed(tokens, client, texts=bool(request.return_token_strs))
            members += [b'"%b": %b' % (name.encode(), text) for name, text in lists.items()]
        return b"{" + b", ".join(members) + b"}"

    async def detokenize(self, request: DetokenizeRequest, client: str) -> dict[str, Any]:
        """Answer /detokenize."""
        self.parts.served_name(request.model)
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

    async def render_metrics(self, path: str, *, sums: bool = True, accept: str = "") -> tuple[bytes, str]:
        """Body and content type of a metrics path; the parameters are those of `Exposition.render`."""
        show_workers(self.pool, self.metrics)
        self._look_at_certificates()
        return await self._exposition.answer(path, sums=sums, accept=accept)

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
            "workers": self.pool.describe("both"),
            "dns": self.pool.names(),
        }
