"""The error tree. Each error names the offending value and the remedy in its message.

KvrailError
├── ConfigError               a setting is wrong; the process does not start
├── UnsupportedModelError     the engine cannot run this model exactly; refused at load
├── InvalidRequestError       the client's request is wrong; names the parameter
│   └── ContextLengthError    prompt and output do not fit the model's context
├── ModelNotFoundError        no such model is served here
├── ResponseNotFoundError     no such response is kept
├── AuthenticationError       no valid API key
├── OverloadedError           no capacity now; carries seconds after which to retry
│   └── RateLimitError        an API key has had what it may have in this time
├── IncompatibleError         the handshake failed: protocol, model, layout, codec or transport differ
├── FrameError                a frame is torn, corrupt, out of order, duplicated or oversized
├── TransferAbortedError      the sender gave up a transfer before its last frame
├── WorkerUnavailableError    a worker cannot be reached or was lost
│   └── PeerRefusedError       this process's certificate does not permit the call
├── DeadlineError             the request's deadline passed
└── RequestCancelledError     the caller went away

Errors cross a process boundary as a gRPC status (kvrail.rpc.errors) or an HTTP error object
(kvrail.services.router.errors), mapped in exactly those two places.
"""


def reason_of(error: BaseException) -> str:
    """What an error says, or where it says nothing, as a timeout does, its class."""
    return str(error) or type(error).__name__


class KvrailError(Exception):
    """Base of every error that kvrail raises on purpose."""


class ConfigError(KvrailError):
    """A setting is wrong."""


class UnsupportedModelError(KvrailError):
    """The engine cannot run this model exactly."""


class InvalidRequestError(KvrailError):
    """The client's request is wrong; `param` names the request field."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(InvalidRequestError):
    """Prompt and output together exceed the model's context."""


class ModelNotFoundError(KvrailError):
    """No such model is served here."""


class ResponseNotFoundError(KvrailError):
    """No such response is kept."""


class AuthenticationError(KvrailError):
    """No valid API key."""


class OverloadedError(KvrailError):
    """No capacity now; retry after `retry_after` seconds."""

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RateLimitError(OverloadedError):
    """An API key has had what it may have in this time."""


class IncompatibleError(KvrailError):
    """The two ends of a hop do not agree on protocol, model, layout, codec or transport."""


class FrameError(KvrailError):
    """A frame is torn, corrupt, out of order, duplicated or oversized."""


class TransferAbortedError(KvrailError):
    """The sender gave up a transfer before its last frame."""


class WorkerUnavailableError(KvrailError):
    """A worker cannot be reached or was lost."""


class PeerRefusedError(WorkerUnavailableError):
    """The call is not permitted to this process's certificate."""


class DeadlineError(KvrailError):
    """The request's deadline passed."""


class RequestCancelledError(KvrailError):
    """The caller went away."""
