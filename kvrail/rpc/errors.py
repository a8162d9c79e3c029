"""The one mapping between the error tree and gRPC statuses.

Any client understands the status code. The trailer `kvrail-error-bin` adds what a code cannot say, as JSON: the
error's class and attributes. A peer that sends no trailer, or a foreign one, is mapped by its code alone.
"""

import asyncio
import functools
import json
import logging
import re
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar, cast

import grpc
import grpc.aio

from kvrail.errors import (
    AuthenticationError,
    ConfigError,
    ContextLengthError,
    DeadlineError,
    FrameError,
    IncompatibleError,
    InvalidRequestError,
    KvrailError,
    ModelNotFoundError,
    OverloadedError,
    PeerRefusedError,
    RateLimitError,
    RequestCancelledError,
    ResponseNotFoundError,
    TransferAbortedError,
    UnsupportedModelError,
    WorkerUnavailableError,
)

log = logging.getLogger(__name__)

TRAILER = "kvrail-error-bin"
MAX_MESSAGE_CHARS = 500  # gRPC may refuse metadata above 8 KiB; a character takes up to 12 bytes there
MAX_PARAM_CHARS = 100
MAX_RETRY_AFTER_S = 3600.0

_CODES: dict[type[KvrailError], grpc.StatusCode] = {
    KvrailError: grpc.StatusCode.INTERNAL,
    ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
    UnsupportedModelError: grpc.StatusCode.UNIMPLEMENTED,
    InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    ContextLengthError: grpc.StatusCode.INVALID_ARGUMENT,
    ModelNotFoundError: grpc.StatusCode.NOT_FOUND,
    ResponseNotFoundError: grpc.StatusCode.NOT_FOUND,
    AuthenticationError: grpc.StatusCode.UNAUTHENTICATED,
    OverloadedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    RateLimitError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    IncompatibleError: grpc.StatusCode.FAILED_PRECONDITION,
    FrameError: grpc.StatusCode.DATA_LOSS,
    TransferAbortedError: grpc.StatusCode.ABORTED,
    WorkerUnavailableError: grpc.StatusCode.UNAVAILABLE,
    PeerRefusedError: grpc.StatusCode.PERMISSION_DENIED,
    DeadlineError: grpc.StatusCode.DEADLINE_EXCEEDED,
    RequestCancelledError: grpc.StatusCode.CANCELLED,
}
_CLASSES = {cls.__name__: cls for cls in _CODES}

_FOREIGN: dict[grpc.StatusCode, type[KvrailError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequestError,
    grpc.StatusCode.NOT_FOUND: ModelNotFoundError,
    grpc.StatusCode.UNAUTHENTICATED: AuthenticationError,
    grpc.StatusCode.PERMISSION_DENIED: PeerRefusedError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.FAILED_PRECONDITION: IncompatibleError,
    grpc.StatusCode.UNIMPLEMENTED: IncompatibleError,
    grpc.StatusCode.DATA_LOSS: FrameError,
    grpc.StatusCode.ABORTED: TransferAbortedError,
    grpc.StatusCode.UNAVAILABLE: WorkerUnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.CANCELLED: RequestCancelledError,
}


def to_status(error: KvrailError) -> tuple[grpc.StatusCode, str, bytes]:
    """Status code, message and trailer of an error."""
    cls = next(base for base in type(error).__mro__ if base in _CODES)
    fields: dict[str, Any] = {"error": cls.__name__}
    if isinstance(error, InvalidRequestError):
        fields["param"] = error.param and error.param[:MAX_PARAM_CHARS]
    if isinstance(error, OverloadedError):
        fields["retry_after"] = error.retry_after
    message = str(error)
    if len(message) > MAX_MESSAGE_CHARS:
        message = message[: MAX_MESSAGE_CHARS - 1] + "…"
    return _CODES[cls], message, json.dumps(fields).encode()


def _from_trailer(trailer: bytes, message: str) -> KvrailError | None:
    """Read a peer's trailer; None where it is not one of ours."""
    try:
        fields = json.loads(trailer)
        cls = _CLASSES[fields["error"]]
        if issubclass(cls, InvalidRequestError):
            param = fields["param"]
            return cls(message, param=param if param is None else _shown(str(param), MAX_PARAM_CHARS))
        if issubclass(cls, OverloadedError):
            retry_after = float(fields["retry_after"])
            return cls(message, retry_after=retry_after) if 0.0 <= retry_after <= MAX_RETRY_AFTER_S else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return cls(message)


_UNLIKE_TLS = re.compile("failed to connect.*(Socket closed|handshake failed|Verification Check failed)", re.DOTALL)
"""What gRPC says where one end asks for TLS and the other has none, or where a certificate is refused."""

_BROKEN_OFF = "Internal error from Core"
"""What grpc.aio says of itself, not of its peer, where the connection ends in the middle of an operation."""


def from_rpc_error(error: grpc.RpcError, *, peer: str = "") -> KvrailError:
    """The error that a peer raised, or the one that its plain status means; `peer` is named in the latter."""
    trailers = [value for key, value in error.trailing_metadata() or () if key == TRAILER]
    return from_status(error.code(), error.details() or "", trailers, peer=peer)


def from_status(code: grpc.StatusCode, details: str, trailers: Iterable[bytes] = (), *, peer: str = "") -> KvrailError:
    """The error that a status and its trailers, as `to_status` makes them, stand for.

    The message may reach a log or a client: it is cut, and loses control characters.
    """
    details = _shown(details, MAX_MESSAGE_CHARS) or "it gives no reason"
    for trailer in trailers:
        if (known := _from_trailer(trailer, details)) is not None:
            return known
    message = f"{peer or 'the peer'} answered {code.name}: {details}"
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "message larger than max" in details:
        return FrameError(message)  # gRPC's own bound, not a lack of capacity: to retry would not help
    if code is grpc.StatusCode.INTERNAL and details == _BROKEN_OFF:
        return WorkerUnavailableError(message)
    if code is grpc.StatusCode.UNAVAILABLE and _UNLIKE_TLS.search(details):
        message += "; compare --tls-ca, --tls-cert and --tls-key of both ends, and see the worker's log"
    return _FOREIGN.get(code, KvrailError)(message)


def _shown(text: str, most: int) -> str:
    return "".join(char if char.isprintable() else " " for char in text[:most])


_BY_NUMBER = {code.value[0]: code for code in grpc.StatusCode}


def code_of(number: int) -> grpc.StatusCode:
    """The status code that has this number; UNKNOWN where none has."""
    return _BY_NUMBER.get(number, grpc.StatusCode.UNKNOWN)


async def abort_with(context: grpc.aio.ServicerContext, error: KvrailError) -> NoReturn:
    """End a call with the status that `error` maps to."""
    code, message, trailer = to_status(error)
    await context.abort(code, message, trailing_metadata=((TRAILER, trailer),))
    raise AssertionError("context.abort returned")


def internal_error(error: BaseException, request: Any) -> KvrailError:
    """Log an unexpected error; returns the one that the caller gets."""
    request_id = getattr(request, "request_id", "") or "without id"
    log.error("request %s failed", request_id, exc_info=error)
    return KvrailError(f"internal error in request {request_id}; the worker's log has the cause")


_Method = TypeVar("_Method", bound=Callable[..., Any])


def maps_errors(method: _Method) -> _Method:
    """Let a servicer's method, a coroutine, raise from the error tree; an unexpected error is logged, sent as INTERNAL.

    Cancellation passes untouched: the caller no longer listens.
    """

    @functools.wraps(method)
    async def mapped(self: Any, request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            return await method(self, request, context)
        except grpc.aio.AbortError:
            raise
        except KvrailError as error:
            await abort_with(context, error)
        except Exception as error:  # noqa: BLE001 - the boundary of the process
            await abort_with(context, internal_error(error, request))

    return cast(_Method, mapped)


def is_cancelling() -> bool:
    """Whether the current task has been asked to stop, as opposed to a call inside it."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
