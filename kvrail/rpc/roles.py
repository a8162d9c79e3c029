"""Which roles may call which method; the role is in the caller's certificate."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from kvrail.errors import PeerRefusedError
from kvrail.rpc.errors import abort_with
from kvrail.security.tls import Role, roles_of
from kvrail.wire.v1 import decode_pb2, prefill_pb2

log = logging.getLogger(__name__)

_DECODE = decode_pb2.DESCRIPTOR.services_by_name["Decode"].full_name
_PREFILL = prefill_pb2.DESCRIPTOR.services_by_name["Prefill"].full_name
CALLERS: dict[str, frozenset[Role]] = {
    f"/{_DECODE}/Events": frozenset({"router"}),
    f"/{_DECODE}/Submit": frozenset({"router"}),
    f"/{_DECODE}/Abort": frozenset({"router"}),
    f"/{_DECODE}/GetStatus": frozenset({"router"}),
    f"/{_PREFILL}/Prefill": frozenset({"decode"}),
    f"/{_PREFILL}/GetStatus": frozenset({"router", "decode"}),
    "/grpc.health.v1.Health/Check": frozenset({"router", "prefill", "decode", "metrics"}),
    "/grpc.health.v1.Health/Watch": frozenset({"router", "prefill", "decode", "metrics"}),
}
"""Roles that may call a method; no role may call one that is missing here."""

Serve = Callable[[Any, grpc.aio.ServicerContext], Any]


class RoleCheck(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls if the caller's certificate has no role for them."""

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        """Put the check before the method's handler."""
        handler = await continuation(details)
        if handler is None:
            return handler
        allowed = CALLERS.get(details.method, frozenset())
        kinds = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
        return handler._replace(
            **{
                kind: _checked(serve, details.method, allowed)
                for kind in kinds
                if (serve := getattr(handler, kind)) is not None
            }
        )


def _checked(serve: Serve, method: str, allowed: frozenset[Role]) -> Serve:
    """`serve` behind the check."""

    async def checked(request: Any, context: grpc.aio.ServicerContext) -> Any:
        await _check(context, method, allowed)
        return await serve(request, context)

    return checked


async def _check(context: grpc.aio.ServicerContext, method: str, allowed: frozenset[Role]) -> None:
    roles = roles_of(uri.decode(errors="replace") for uri in context.auth_context().get("peer_uri", ()))
    if roles & allowed:
        return
    shown = " and ".join(sorted(roles)) or "no role"
    wanted = " or ".join(sorted(allowed)) or "no role"
    log.warning(
        "refused %s from %s: its certificate has %s, the method is for %s", method, context.peer(), shown, wanted
    )
    await abort_with(
        context,
        PeerRefusedError(f"{method} is for {wanted}; the caller's certificate has {shown}; use one of that role"),
    )
