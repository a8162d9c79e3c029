"""The HTTP application: its paths, middleware and the lifetime of the router's parts."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp

from kvrail.config.settings import RouterSettings
from kvrail.rpc.http_side import MembersOnly
from kvrail.runtime.turns import Turns
from kvrail.security.keyfile import KeyFile
from kvrail.security.tls import DoorCertificate, Tls
from kvrail.services.router import errors
from kvrail.services.router.answer.service import RouterService
from kvrail.services.router.http import openapi
from kvrail.services.router.http.bodies import BodyLimit
from kvrail.services.router.http.middleware import ApiKeys, OneSpelling, RequestContext
from kvrail.services.router.http.quotas import HEADERS, KeyLimits, KeyMetrics, Quotas
from kvrail.services.router.http.routes import (
    admin_routes,
    api_routes,
    count_refusal,
    messages_routes,
    operator_routes,
    responses_routes,
)
from kvrail.services.router.page.routes import page_routes
from kvrail.services.router.page.status import StatusPage
from kvrail.services.router.plan.defaults import Defaults
from kvrail.services.router.responses.service import Responses
from kvrail.text import Tokenizer

OPEN_TO_ALL = frozenset({"/live", "/ready"})
"""Paths of the admin port for who has no certificate: probes, which learn one word."""


def build_admin(public: FastAPI, drain: Callable[[], object], tls: Tls | None, *, page: bool) -> ASGIApp:
    """The application of the admin port, on the same service as `public`. page: whether it has the status page."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.state = public.state
    routers = [admin_routes(drain), *([page_routes(operators=True)] if page else [])]
    for router in routers:
        app.include_router(router)
    errors.install(app, lambda request, error: None, [route for router in routers for route in router.routes])
    app.add_middleware(OneSpelling)
    return app if tls is None else MembersOnly(app, OPEN_TO_ALL)


def build_app(settings: RouterSettings, tokenizer: Tokenizer, defaults: Defaults) -> FastAPI:
    """The application; `app.state.service` is set while it runs.

    Its state has `parsing`, the turns at parsing long bodies, and the certificates `tls` and `door`, where there are
    any. Raises ConfigError where a certificate cannot be used.
    """
    tls, door = Tls.of(settings, "router"), DoorCertificate.of(settings.tls_http_cert, settings.tls_http_key)
    ends = {use: each.end for use, each in (("services", tls), ("door", door)) if each is not None}
    keys, quotas = KeyFile(settings.api_keys_file) if settings.api_keys_file else None, Quotas()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service = RouterService(settings, tokenizer, defaults, tls, ends)
        app.state.service = service
        app.state.responses = Responses(service)
        app.state.status_page = StatusPage(service)
        if keys is not None:
            quotas.metrics = KeyMetrics(service.registry, service.model)
            keys.on_failure(quotas.metrics.file_errors.inc)
            for key in keys.keys().values():
                quotas.metrics.known(key.name)
        service.pool.start()
        app.state.status_page.start()
        try:
            yield
        finally:
            await app.state.status_page.close()
            await service.pool.close()
            await service.checker.close()
            if service.tracing is not None:
                await asyncio.to_thread(service.tracing.close)

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.parsing = Turns()
    app.state.tls, app.state.door = tls, door
    openapi.describe(app, settings.model_names)
    whole = settings.admin_port < 0
    routers = [api_routes(), responses_routes(), messages_routes(), operator_routes(whole=whole)]
    if settings.status_page != "off" and whole:
        routers.append(page_routes())
    for router in routers:
        app.include_router(router)
    routes = [route for router in routers for route in router.routes]
    errors.install(app, count_refusal, routes)
    # The last one added is the outermost.
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    if keys is not None:
        app.add_middleware(KeyLimits, quotas=quotas, refused=lambda scope, error: count_refusal(Request(scope), error))
    app.add_middleware(ApiKeys, keys=settings.api_keys, file=keys)
    if settings.cors_origins:  # before the keys: a browser asks without one what it may do
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "HEAD", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Request-Id", "Retry-After", *HEADERS],
        )
    app.add_middleware(RequestContext, routes=[*routes, *app.routes])
    app.add_middleware(OneSpelling)
    return app
