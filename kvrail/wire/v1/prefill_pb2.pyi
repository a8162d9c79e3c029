from kvrail.wire.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OfferedCodec(_message.Message):
    __slots__ = ("name", "parameters_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    parameters_id: int
    def __init__(self, name: _Optional[str] = ..., parameters_id: _Optional[int] = ...) -> None: ...

class OfferedTransport(_message.Message):
    __slots__ = ("name", "address", "on_device")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ON_DEVICE_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: bytes
    on_device: bool
    def __init__(self, name: _Optional[str] = ..., address: _Optional[bytes] = ..., on_device: _Optional[bool] = ...) -> None: ...

class Handshake(_message.Message):
    __slots__ = ("protocol_version", "model_fingerprint", "layout", "held_pages", "codecs", "link_bytes_per_s", "max_frame_bytes", "transports", "transfer_key")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    HELD_PAGES_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    LINK_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    MAX_FRAME_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_KEY_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    model_fingerprint: str
    layout: _common_pb2.KVLayout
    held_pages: int
    codecs: _containers.RepeatedCompositeFieldContainer[OfferedCodec]
    link_bytes_per_s: int
    max_frame_bytes: int
    transports: _containers.RepeatedCompositeFieldContainer[OfferedTransport]
    transfer_key: int
    def __init__(self, protocol_version: _Optional[int] = ..., model_fingerprint: _Optional[str] = ..., layout: _Optional[_Union[_common_pb2.KVLayout, _Mapping]] = ..., held_pages: _Optional[int] = ..., codecs: _Optional[_Iterable[_Union[OfferedCodec, _Mapping]]] = ..., link_bytes_per_s: _Optional[int] = ..., max_frame_bytes: _Optional[int] = ..., transports: _Optional[_Iterable[_Union[OfferedTransport, _Mapping]]] = ..., transfer_key: _Optional[int] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("request_id", "prompt_token_ids", "sampling", "handshake", "trace", "trace_context", "cache_salt", "client")
    class TraceContextEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    HANDSHAKE_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    TRACE_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.SamplingParams
    handshake: Handshake
    trace: bool
    trace_context: _containers.ScalarMap[str, str]
    cache_salt: str
    client: str
    def __init__(self, request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., handshake: _Optional[_Union[Handshake, _Mapping]] = ..., trace: _Optional[bool] = ..., trace_context: _Optional[_Mapping[str, str]] = ..., cache_salt: _Optional[str] = ..., client: _Optional[str] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("protocol_version", "codec", "transport", "first_page", "page_count", "transport_address", "numerics")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    FIRST_PAGE_FIELD_NUMBER: _ClassVar[int]
    PAGE_COUNT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    codec: str
    transport: str
    first_page: int
    page_count: int
    transport_address: bytes
    numerics: str
    def __init__(self, protocol_version: _Optional[int] = ..., codec: _Optional[str] = ..., transport: _Optional[str] = ..., first_page: _Optional[int] = ..., page_count: _Optional[int] = ..., transport_address: _Optional[bytes] = ..., numerics: _Optional[str] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("token_ids", "logprobs", "marks")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MARKS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    marks: _containers.RepeatedCompositeFieldContainer[_common_pb2.Mark]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ..., marks: _Optional[_Iterable[_Union[_common_pb2.Mark, _Mapping]]] = ...) -> None: ...

class FrameAnnounced(_message.Message):
    __slots__ = ("head", "payload_bytes", "on_device")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    ON_DEVICE_FIELD_NUMBER: _ClassVar[int]
    head: bytes
    payload_bytes: int
    on_device: bool
    def __init__(self, head: _Optional[bytes] = ..., payload_bytes: _Optional[int] = ..., on_device: _Optional[bool] = ...) -> None: ...

class TransferDone(_message.Message):
    __slots__ = ("frame_count", "payload_bytes", "spans")
    FRAME_COUNT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    frame_count: int
    payload_bytes: int
    spans: _containers.RepeatedCompositeFieldContainer[_common_pb2.Span]
    def __init__(self, frame_count: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., spans: _Optional[_Iterable[_Union[_common_pb2.Span, _Mapping]]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefillReply(_message.Message):
    __slots__ = ("accepted", "first_token", "done", "announced", "heartbeat")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    accepted: Accepted
    first_token: FirstToken
    done: TransferDone
    announced: FrameAnnounced
    heartbeat: Heartbeat
    def __init__(self, accepted: _Optional[_Union[Accepted, _Mapping]] = ..., first_token: _Optional[_Union[FirstToken, _Mapping]] = ..., done: _Optional[_Union[TransferDone, _Mapping]] = ..., announced: _Optional[_Union[FrameAnnounced, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...
