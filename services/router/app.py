"""The HTTP application: paths, middleware and the lifetime of the router's parts."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvrail import __version__, exposition
from kvrail.config import RouterSettings
from kvrail.errors import KvrailError
from kvrail.text import Tokenizer
from services.router import errors
from services.router.bodies import BodyLimit, JsonRoute
from services.router.errors import UNAVAILABLE_RETRY_S
from services.router.middleware import ApiKeys, RequestContext
from services.router.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from services.router.service import RouterService


def build_app(settings: RouterSettings, tokenizer: Tokenizer) -> FastAPI:
    """The application; `app.state.service` is set while it runs. `app.state.parsing`: whose body is parsed."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service = RouterService(settings, tokenizer)
        app.state.service = service
        service.pool.start()
        try:
            yield
        finally:
            await service.pool.close()

    app = FastAPI(title="kvrail", version=__version__, lifespan=lifespan)
    app.state.parsing = asyncio.Lock()
    errors.install(app, count_refusal)
    app.include_router(api_routes())
    app.include_router(operator_routes())
    # The last one added is the outermost.
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    app.add_middleware(ApiKeys, keys=settings.api_keys)
    app.add_middleware(RequestContext)
    return app


GENERATION_PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})


def count_refusal(request: Request, error: KvrailError) -> None:
    """Count a generation request that was refused before it became one."""
    if request.url.path in GENERATION_PATHS:
        _service(request).metrics.outcomes[errors.outcome_of(error)].inc()


def _service(request: Request) -> RouterService:
    service = request.app.state.service
    assert isinstance(service, RouterService)
    return service


def api_routes() -> APIRouter:
    """What clients use."""
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/chat/completions", response_class=JSONResponse)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a chat."""
        return _service(request).chat(body, request.state)

    @router.post("/v1/completions", response_class=JSONResponse)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue prompts."""
        return _service(request).complete(body, request.state)

    @router.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        """List the one model."""
        return {"object": "list", "data": [_service(request).card()]}

    @router.get("/v1/models/{model_id:path}")
    async def model(model_id: str, request: Request) -> dict[str, Any]:
        """Describe the model."""
        service = _service(request)
        service.check_model(model_id)
        return service.card()

    @router.post("/tokenize", response_class=JSONResponse)
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        """Count and list the tokens of a prompt or a chat."""
        return Response(await _service(request).tokenize(body, request.state.client), media_type="application/json")

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest, request: Request) -> dict[str, Any]:
        """Write tokens as text."""
        return await _service(request).detokenize(body, request.state.client)

    return router


def operator_routes() -> APIRouter:
    """What probes and scrapers use."""
    router = APIRouter()

    @router.get("/health")
    async def health(request: Request) -> Response:
        """Say whether requests can be served, and each worker's state."""
        status, body = _service(request).health()
        headers = {} if status == 200 else {"retry-after": str(UNAVAILABLE_RETRY_S)}
        return JSONResponse(body, status, headers)

    @router.get("/version")
    async def version() -> dict[str, str]:
        """The server's version."""
        return {"version": __version__}

    @router.get("/metrics")
    async def own_metrics(request: Request) -> Response:
        """Prometheus metrics under our own names."""
        return _exposition(exposition.render(_service(request).registry))

    @router.get("/metrics/vllm")
    async def vllm_metrics(request: Request) -> Response:
        """The same metrics under vLLM's names."""
        return _exposition(exposition.render_vllm(_service(request).registry))

    return router


def _exposition(rendered: tuple[bytes, str]) -> Response:
    body, content_type = rendered
    return Response(body, headers={"content-type": content_type})
