"""The HTTP application: its paths, middleware and the lifetime of the router's parts."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from kvrail.config import RouterSettings
from kvrail.services.router import errors, openapi
from kvrail.services.router.bodies import BodyLimit
from kvrail.services.router.messages.service import Messages
from kvrail.services.router.middleware import ApiKeys, RequestContext
from kvrail.services.router.responses.service import Responses
from kvrail.services.router.routes import api_routes, count_refusal, messages_routes, operator_routes, responses_routes
from kvrail.services.router.service import RouterService
from kvrail.text import Tokenizer
from kvrail.tls import Tls


def build_app(settings: RouterSettings, tokenizer: Tokenizer) -> FastAPI:
    """The application; `app.state.service` is set while it runs. `app.state.parsing`: whose body is parsed."""
    tls = Tls.of(settings, "router")

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service = RouterService(settings, tokenizer, tls)
        app.state.service = service
        app.state.responses = Responses(service)
        app.state.messages = Messages(service)
        service.pool.start()
        try:
            yield
        finally:
            await service.pool.close()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.parsing = asyncio.Lock()
    openapi.describe(app, settings.model_names)
    routers = (api_routes(), responses_routes(), messages_routes(), operator_routes())
    for router in routers:
        app.include_router(router)
    errors.install(app, count_refusal, [route for router in routers for route in router.routes])
    # The last one added is the outermost.
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    app.add_middleware(ApiKeys, keys=settings.api_keys)
    if settings.cors_origins:  # before the keys: a browser asks without one what it may do
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "HEAD", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(RequestContext)
    return app
