from kvrail.wire.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "model", "prompt_token_ids", "sampling", "prefill_workers", "codec", "resumed", "provisional", "trace", "prefill_instances", "trace_context", "scored_tokens", "client", "cache_salt", "kv_cache", "exact", "model_fingerprint")
    class TraceContextEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKERS_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    PROVISIONAL_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_INSTANCES_FIELD_NUMBER: _ClassVar[int]
    TRACE_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    SCORED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.SamplingParams
    prefill_workers: _containers.RepeatedScalarFieldContainer[str]
    codec: str
    resumed: _containers.RepeatedCompositeFieldContainer[Resumed]
    provisional: bool
    trace: bool
    prefill_instances: _containers.RepeatedScalarFieldContainer[int]
    trace_context: _containers.ScalarMap[str, str]
    scored_tokens: int
    client: str
    cache_salt: str
    kv_cache: str
    exact: bool
    model_fingerprint: str
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., prefill_workers: _Optional[_Iterable[str]] = ..., codec: _Optional[str] = ..., resumed: _Optional[_Iterable[_Union[Resumed, _Mapping]]] = ..., provisional: _Optional[bool] = ..., trace: _Optional[bool] = ..., prefill_instances: _Optional[_Iterable[int]] = ..., trace_context: _Optional[_Mapping[str, str]] = ..., scored_tokens: _Optional[int] = ..., client: _Optional[str] = ..., cache_salt: _Optional[str] = ..., kv_cache: _Optional[str] = ..., exact: _Optional[bool] = ..., model_fingerprint: _Optional[str] = ...) -> None: ...

class Resumed(_message.Message):
    __slots__ = ("token_ids", "ended")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    ended: bool
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., ended: _Optional[bool] = ...) -> None: ...

class EventsRequest(_message.Message):
    __slots__ = ("taken",)
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    taken: int
    def __init__(self, taken: _Optional[int] = ...) -> None: ...

class SubmitRequest(_message.Message):
    __slots__ = ("stream", "number", "timeout_s", "request")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    stream: int
    number: int
    timeout_s: float
    request: GenerateRequest
    def __init__(self, stream: _Optional[int] = ..., number: _Optional[int] = ..., timeout_s: _Optional[float] = ..., request: _Optional[_Union[GenerateRequest, _Mapping]] = ...) -> None: ...

class SubmitReply(_message.Message):
    __slots__ = ("sent",)
    SENT_FIELD_NUMBER: _ClassVar[int]
    sent: int
    def __init__(self, sent: _Optional[int] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("stream", "numbers")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    stream: int
    numbers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, stream: _Optional[int] = ..., numbers: _Optional[_Iterable[int]] = ...) -> None: ...

class AbortReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Drafted(_message.Message):
    __slots__ = ("position", "token_ids", "text")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    position: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    def __init__(self, position: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ...) -> None: ...

class Verified(_message.Message):
    __slots__ = ("position", "proposed", "accepted")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    position: int
    proposed: int
    accepted: int
    def __init__(self, position: _Optional[int] = ..., proposed: _Optional[int] = ..., accepted: _Optional[int] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("first", "logprobs", "ranks", "top", "top_ids", "top_logprobs")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    first: int
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    top: int
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, first: _Optional[int] = ..., logprobs: _Optional[_Iterable[float]] = ..., ranks: _Optional[_Iterable[int]] = ..., top: _Optional[int] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class GenerateReply(_message.Message):
    __slots__ = ("index", "token_ids", "text", "logprobs", "finish_reason", "stop_reason", "lossy", "summary", "drafted", "verified", "prompt_logprobs")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    LOSSY_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    finish_reason: FinishReason
    stop_reason: str
    lossy: bool
    summary: GenerateSummary
    drafted: Drafted
    verified: Verified
    prompt_logprobs: PromptLogprobs
    def __init__(self, index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., stop_reason: _Optional[str] = ..., lossy: _Optional[bool] = ..., summary: _Optional[_Union[GenerateSummary, _Mapping]] = ..., drafted: _Optional[_Union[Drafted, _Mapping]] = ..., verified: _Optional[_Union[Verified, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ...) -> None: ...

class EventBatch(_message.Message):
    __slots__ = ("requests", "running", "stream")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RequestEvents]
    running: Running
    stream: int
    def __init__(self, requests: _Optional[_Iterable[_Union[RequestEvents, _Mapping]]] = ..., running: _Optional[_Union[Running, _Mapping]] = ..., stream: _Optional[int] = ...) -> None: ...

class Running(_message.Message):
    __slots__ = ("numbers",)
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    numbers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, numbers: _Optional[_Iterable[int]] = ...) -> None: ...

class RequestEvents(_message.Message):
    __slots__ = ("number", "replies", "end")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    number: int
    replies: _containers.RepeatedCompositeFieldContainer[GenerateReply]
    end: RequestEnd
    def __init__(self, number: _Optional[int] = ..., replies: _Optional[_Iterable[_Union[GenerateReply, _Mapping]]] = ..., end: _Optional[_Union[RequestEnd, _Mapping]] = ...) -> None: ...

class RequestEnd(_message.Message):
    __slots__ = ("code", "message", "error")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    error: bytes
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ..., error: _Optional[bytes] = ...) -> None: ...

class GenerateSummary(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "cached_tokens", "marks", "prefill_worker", "codec", "kv_bytes", "kv_raw_bytes", "lossy", "drafts_proposed", "drafts_accepted", "codec_reason", "transport", "exposed_s", "spans", "local_reason", "numerics")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MARKS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_RAW_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOSSY_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_PROPOSED_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    CODEC_REASON_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_S_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_REASON_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    marks: _containers.RepeatedCompositeFieldContainer[_common_pb2.Mark]
    prefill_worker: str
    codec: str
    kv_bytes: int
    kv_raw_bytes: int
    lossy: bool
    drafts_proposed: int
    drafts_accepted: int
    codec_reason: str
    transport: str
    exposed_s: float
    spans: _containers.RepeatedCompositeFieldContainer[_common_pb2.Span]
    local_reason: str
    numerics: str
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., marks: _Optional[_Iterable[_Union[_common_pb2.Mark, _Mapping]]] = ..., prefill_worker: _Optional[str] = ..., codec: _Optional[str] = ..., kv_bytes: _Optional[int] = ..., kv_raw_bytes: _Optional[int] = ..., lossy: _Optional[bool] = ..., drafts_proposed: _Optional[int] = ..., drafts_accepted: _Optional[int] = ..., codec_reason: _Optional[str] = ..., transport: _Optional[str] = ..., exposed_s: _Optional[float] = ..., spans: _Optional[_Iterable[_Union[_common_pb2.Span, _Mapping]]] = ..., local_reason: _Optional[str] = ..., numerics: _Optional[str] = ...) -> None: ...
