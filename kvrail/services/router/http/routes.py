"""The paths of the HTTP API."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from kvrail import __version__
from kvrail.errors import InvalidRequestError, KvrailError
from kvrail.services.router import errors
from kvrail.services.router.answer.answer import Answer
from kvrail.services.router.answer.calls import ChatCall, CompletionCall
from kvrail.services.router.answer.leaving import while_here
from kvrail.services.router.answer.service import RouterService
from kvrail.services.router.errors import UNAVAILABLE_RETRY_S
from kvrail.services.router.fleet.fleet import scrape_targets
from kvrail.services.router.http.bodies import JsonRoute
from kvrail.services.router.http.openapi import (
    ASKED,
    CHUNKS,
    GENERATING,
    MESSAGES,
    READING,
    TEXTS,
    named_events,
    whole_or_stream,
)
from kvrail.services.router.http.shapes.anthropic import AnthropicMessage, Counted, ModelInfo, ModelPage
from kvrail.services.router.http.shapes.openai import ChatCompletion, Completion
from kvrail.services.router.http.shapes.responses import Deleted, InputTokens, ItemPage, ResponseObject
from kvrail.services.router.http.shapes.service import (
    Card,
    Cards,
    Detokenized,
    Health,
    Load,
    ScrapeTarget,
    Status,
    Tokenized,
    TokenizerInfo,
    Version,
)
from kvrail.services.router.messages import writer as messages
from kvrail.services.router.messages.schema import MessagesRequest, Prompted
from kvrail.services.router.messages.service import MessagesCall, count
from kvrail.services.router.responses import writer as responses
from kvrail.services.router.responses.schema import ResponsesRequest
from kvrail.services.router.responses.service import MAX_PAGE, Responses
from kvrail.services.router.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

DOCS = Path(__file__).with_name("docs.html")
EXPOSITION: dict[int | str, dict[str, Any]] = {
    200: {"description": "Prometheus's text format.", "content": {"text/plain": {"schema": {"type": "string"}}}}
}
OnOff = Literal["on", "off"]
GENERATION_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})


def count_refusal(request: Request, error: KvrailError) -> None:
    """Count a generation request that was refused before it became one."""
    if request.url.path in GENERATION_PATHS:
        _service(request).metrics.outcomes[errors.outcome_of(error)].inc()


def _service(request: Request) -> RouterService:
    service = request.app.state.service
    assert isinstance(service, RouterService)
    return service


def _responses(request: Request) -> Responses:
    api = request.app.state.responses
    assert isinstance(api, Responses)
    return api


def api_routes() -> APIRouter:
    """What clients use."""
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/chat/completions", responses=GENERATING | whole_or_stream(ChatCompletion, CHUNKS))
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a chat."""
        service = _service(request)
        return Answer(service.handler, ChatCall(body, request.state, service.parts))

    @router.post("/v1/completions", responses=GENERATING | whole_or_stream(Completion, CHUNKS))
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue prompts."""
        service = _service(request)
        return Answer(service.handler, CompletionCall(body, request.state, service.parts))

    @router.get("/v1/models", responses=READING, response_model=Cards | ModelPage)
    async def models(request: Request) -> dict[str, Any] | ModelPage:
        """List the names of the model, in Anthropic's shape for who sends anthropic-version."""
        cards = _service(request).cards()
        if errors.is_anthropic(request.scope):
            return ModelPage(
                data=[*map(_model_info, cards)], has_more=False, first_id=cards[0]["id"], last_id=cards[-1]["id"]
            )
        return {"object": "list", "data": cards}

    @router.get("/v1/models/{model_id:path}", responses=READING, response_model=Card | ModelInfo)
    async def model(model_id: str, request: Request) -> dict[str, Any] | ModelInfo:
        """Describe the model, in Anthropic's shape for who sends anthropic-version."""
        service = _service(request)
        card = service.card(service.parts.served_name(model_id))
        return _model_info(card) if errors.is_anthropic(request.scope) else card

    @router.get("/tokenizer_info", responses=READING, response_model=TokenizerInfo)
    async def tokenizer_info(request: Request) -> dict[str, Any]:
        """Describe the tokenizer, as vLLM does."""
        return _service(request).tokenizer.describe()

    @router.post("/tokenize", responses=TEXTS | {200: {"model": Tokenized}})
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        """Count and list the tokens of a prompt or a chat."""
        work = _service(request).tokenize(body, request.state.client)
        return Response(await while_here(request.receive, work), media_type="application/json")

    @router.post("/detokenize", responses=TEXTS, response_model=Detokenized)
    async def detokenize(body: DetokenizeRequest, request: Request) -> dict[str, Any]:
        """Write tokens as text."""
        return await while_here(request.receive, _service(request).detokenize(body, request.state.client))

    return router


def _model_info(card: dict[str, Any]) -> ModelInfo:
    """A card in Anthropic's shape."""
    name, since = card["id"], datetime.fromtimestamp(card["created"], UTC).isoformat()
    return ModelInfo(id=name, display_name=name, created_at=since, max_input_tokens=card["max_model_len"])


def responses_routes() -> APIRouter:
    """OpenAI's newer API."""
    router = APIRouter(route_class=JsonRoute)

    @router.post(
        "/v1/responses", responses=GENERATING | whole_or_stream(ResponseObject, named_events(responses.EVENTS))
    )
    async def create(body: ResponsesRequest, request: Request) -> Response:
        """Answer an input of messages and tool results."""
        return _responses(request).create(body, request.state)

    @router.post("/v1/responses/input_tokens", responses=TEXTS, response_model=InputTokens)
    async def input_tokens(body: ResponsesRequest, request: Request) -> dict[str, Any]:
        """Count the tokens of an input."""
        return await while_here(request.receive, _responses(request).count(body, request.state))

    @router.post("/v1/responses/compact", include_in_schema=False)
    async def compact() -> None:
        """Refuse OpenAI's path, which without this would be read as that of a response."""
        raise HTTPException(404)

    @router.get("/v1/responses/{response_id}", responses=READING | {200: {"model": ResponseObject}})
    async def read(response_id: str, request: Request, stream: bool | None = None) -> Response:
        """Read a kept response."""
        return JSONResponse(_responses(request).read(response_id, request.state, stream=stream))

    @router.delete("/v1/responses/{response_id}", responses=READING, response_model=Deleted)
    async def delete(response_id: str, request: Request) -> dict[str, Any]:
        """Forget a response."""
        return _responses(request).delete(response_id, request.state)

    @router.post("/v1/responses/{response_id}/cancel", responses=READING | {200: {"model": ResponseObject}})
    async def cancel(response_id: str, request: Request) -> Response:
        """End a response in progress."""
        return JSONResponse(_responses(request).cancel(response_id, request.state))

    @router.get("/v1/responses/{response_id}/input_items", responses=READING, response_model=ItemPage)
    async def input_items(
        response_id: str,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> dict[str, Any]:
        """List the input of a kept response."""
        return _responses(request).items(response_id, request.state, limit=limit, order=order, after=after)

    return router


def messages_routes() -> APIRouter:
    """Anthropic's API."""
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/messages", responses=MESSAGES | whole_or_stream(AnthropicMessage, named_events(messages.EVENTS)))
    async def create(body: MessagesRequest, request: Request) -> Response:
        """Answer a chat."""
        service = _service(request)
        return Answer(service.handler, MessagesCall(body, request.state, service.parts))

    @router.post("/v1/messages/count_tokens", responses=MESSAGES, response_model=Counted)
    async def count_tokens(body: Prompted, request: Request) -> dict[str, Any]:
        """Count the tokens of a chat."""
        return await while_here(request.receive, count(_service(request), body, request.state.client))

    return router


def operator_routes(*, whole: bool) -> APIRouter:
    """Paths for probes and scrapers. whole: with what only operators may know."""
    router = APIRouter()

    @router.get("/live", response_model=Status)
    @router.head("/live", include_in_schema=False)
    async def live() -> dict[str, str]:
        """Say that the process answers."""
        return {"status": "ok"}

    @router.get("/ready", responses={200: {"model": Status}, 503: {"model": Status}})
    @router.head("/ready", include_in_schema=False)
    async def ready(request: Request) -> Response:
        """Say whether requests can be served."""
        status, body = _service(request).health()
        return _probed(status, {"status": body["status"]})

    @router.get("/ping", responses={200: {"model": Status}, 503: {"model": Status}})
    @router.post("/ping", responses={200: {"model": Status}, 503: {"model": Status}})
    async def ping(request: Request) -> Response:
        """Say the same as /ready, under the path that SageMaker and vLLM's clients ask."""
        return await ready(request)

    health_model = Health if whole else Status

    @router.get("/health", responses={200: {"model": health_model}, 503: {"model": health_model}})
    @router.head("/health", include_in_schema=False)
    async def health(request: Request) -> Response:
        """Say whether requests can be served; to operators also each worker's state."""
        status, body = _service(request).health()
        return _probed(status, body if whole else {"status": "ok" if status == 200 else "unavailable"})

    page = DOCS.read_text(encoding="utf-8")

    @router.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        """A page that shows the OpenAPI document and sends requests; it loads nothing from elsewhere."""
        return HTMLResponse(page)

    @router.get("/version", response_model=Version)
    async def version() -> dict[str, str]:
        """The server's version."""
        return {"version": __version__}

    if whole:
        _add_metrics(router)
    return router


def admin_routes(drain: Callable[[], object]) -> APIRouter:
    """Paths for operators on a port of their own. drain: begins to drain the server."""
    router = operator_routes(whole=True)

    @router.post("/drain", status_code=202, response_model=Status)
    async def draining(request: Request) -> dict[str, str]:
        """Take no new requests; the process ends once the running ones have."""
        if origin := request.headers.get("origin"):  # of any site: browsers send such a POST without asking before
            raise InvalidRequestError(f"Origin: {origin[:80]!r}: pages in browsers may not drain; use another client")
        drain()
        return {"status": "draining"}

    return router


def _add_metrics(router: APIRouter) -> None:
    @router.get("/metrics", responses=EXPOSITION, response_class=Response)
    async def own_metrics(request: Request) -> Response:
        """Prometheus metrics."""
        return await _exposition(request, "/metrics")

    @router.get("/metrics/vllm", responses=ASKED | EXPOSITION, response_class=Response)
    async def vllm_metrics(request: Request, sums: OnOff = "on") -> Response:
        """The same metrics under vLLM's names and, unless `sums` is off, the sums over all decode workers."""
        return await _exposition(request, "/metrics/vllm", sums)

    @router.get("/load", response_model=Load)
    async def load(request: Request) -> dict[str, int]:
        """Count the sequences that are here, as vLLM does."""
        return {"server_load": _service(request).admission.active}

    @router.get("/metrics/targets", responses=ASKED, response_model=list[ScrapeTarget])
    async def targets(request: Request, names: Literal["kvrail", "vllm"] = "kvrail") -> list[dict[str, Any]]:
        """List the addresses of all metrics, for Prometheus's HTTP service discovery."""
        pool, url = _service(request).pool, request.url
        return scrape_targets(pool, url.netloc, vllm=names == "vllm", router_tls=url.scheme == "https")


def _probed(status: int, body: dict[str, Any]) -> Response:
    headers = {} if status == 200 else {"retry-after": str(UNAVAILABLE_RETRY_S)}
    return JSONResponse(body, status, headers)


async def _exposition(request: Request, path: str, sums: OnOff = "on") -> Response:
    accept = request.headers.get("accept", "")
    body, content_type = await _service(request).render_metrics(path, sums=sums == "on", accept=accept)
    return Response(body, headers={"content-type": content_type})
