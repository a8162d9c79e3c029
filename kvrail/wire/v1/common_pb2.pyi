from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KVLayout(_message.Message):
    __slots__ = ("num_layers", "num_kv_heads", "key_dim", "value_dim", "page_size", "dtype")
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    KEY_DIM_FIELD_NUMBER: _ClassVar[int]
    VALUE_DIM_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    num_layers: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    page_size: int
    dtype: str
    def __init__(self, num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., key_dim: _Optional[int] = ..., value_dim: _Optional[int] = ..., page_size: _Optional[int] = ..., dtype: _Optional[str] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("name", "fingerprint", "vocab_size", "max_model_len", "numerics")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    name: str
    fingerprint: str
    vocab_size: int
    max_model_len: int
    numerics: str
    def __init__(self, name: _Optional[str] = ..., fingerprint: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., numerics: _Optional[str] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "logprobs", "stop", "stop_token_ids", "ignore_eos", "include_stop_in_output", "skip_special_tokens", "n", "grammar", "logprob_token_ids", "prompt_logprobs")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    seed: int
    logprobs: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    include_stop_in_output: bool
    skip_special_tokens: bool
    n: int
    grammar: str
    logprob_token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_logprobs: int
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., seed: _Optional[int] = ..., logprobs: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., include_stop_in_output: _Optional[bool] = ..., skip_special_tokens: _Optional[bool] = ..., n: _Optional[int] = ..., grammar: _Optional[str] = ..., logprob_token_ids: _Optional[_Iterable[int]] = ..., prompt_logprobs: _Optional[int] = ...) -> None: ...

class TopLogprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TopLogprob]
    def __init__(self, logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TopLogprob, _Mapping]]] = ...) -> None: ...

class Mark(_message.Message):
    __slots__ = ("moment", "seconds")
    MOMENT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    moment: str
    seconds: float
    def __init__(self, moment: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("process", "track", "name", "begin", "seconds", "sizes")
    class SizesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    TRACK_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    process: str
    track: str
    name: str
    begin: float
    seconds: float
    sizes: _containers.ScalarMap[str, int]
    def __init__(self, process: _Optional[str] = ..., track: _Optional[str] = ..., name: _Optional[str] = ..., begin: _Optional[float] = ..., seconds: _Optional[float] = ..., sizes: _Optional[_Mapping[str, int]] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("stored_to", "removed_to", "max_pages")
    STORED_TO_FIELD_NUMBER: _ClassVar[int]
    REMOVED_TO_FIELD_NUMBER: _ClassVar[int]
    MAX_PAGES_FIELD_NUMBER: _ClassVar[int]
    stored_to: int
    removed_to: int
    max_pages: int
    def __init__(self, stored_to: _Optional[int] = ..., removed_to: _Optional[int] = ..., max_pages: _Optional[int] = ...) -> None: ...

class KVEvents(_message.Message):
    __slots__ = ("snapshot", "stored_to", "removed_to", "stored", "removed", "complete")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    STORED_TO_FIELD_NUMBER: _ClassVar[int]
    REMOVED_TO_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    snapshot: bool
    stored_to: int
    removed_to: int
    stored: _containers.RepeatedScalarFieldContainer[int]
    removed: _containers.RepeatedScalarFieldContainer[int]
    complete: bool
    def __init__(self, snapshot: _Optional[bool] = ..., stored_to: _Optional[int] = ..., removed_to: _Optional[int] = ..., stored: _Optional[_Iterable[int]] = ..., removed: _Optional[_Iterable[int]] = ..., complete: _Optional[bool] = ...) -> None: ...

class StepCost(_message.Message):
    __slots__ = ("prefill_base", "prefill_each", "decode_base", "decode_each", "fetch_each", "prefill_full")
    PREFILL_BASE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_EACH_FIELD_NUMBER: _ClassVar[int]
    DECODE_BASE_FIELD_NUMBER: _ClassVar[int]
    DECODE_EACH_FIELD_NUMBER: _ClassVar[int]
    FETCH_EACH_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FULL_FIELD_NUMBER: _ClassVar[int]
    prefill_base: float
    prefill_each: float
    decode_base: float
    decode_each: float
    fetch_each: float
    prefill_full: float
    def __init__(self, prefill_base: _Optional[float] = ..., prefill_each: _Optional[float] = ..., decode_base: _Optional[float] = ..., decode_each: _Optional[float] = ..., fetch_each: _Optional[float] = ..., prefill_full: _Optional[float] = ...) -> None: ...

class CodecBytes(_message.Message):
    __slots__ = ("codec", "raw_bytes", "payload_bytes")
    CODEC_FIELD_NUMBER: _ClassVar[int]
    RAW_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    codec: str
    raw_bytes: int
    payload_bytes: int
    def __init__(self, codec: _Optional[str] = ..., raw_bytes: _Optional[int] = ..., payload_bytes: _Optional[int] = ...) -> None: ...

class WorkerReport(_message.Message):
    __slots__ = ("received", "drafts_proposed", "drafts_accepted", "link_bytes_per_s", "prefix_queried_tokens", "prefix_hit_tokens", "compiling", "device", "memory_used", "memory_total", "prompt_tokens")
    class LinkBytesPerSEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_PROPOSED_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    LINK_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERIED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPILING_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_USED_FIELD_NUMBER: _ClassVar[int]
    MEMORY_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    received: _containers.RepeatedCompositeFieldContainer[CodecBytes]
    drafts_proposed: int
    drafts_accepted: int
    link_bytes_per_s: _containers.ScalarMap[str, float]
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    compiling: _containers.RepeatedScalarFieldContainer[str]
    device: str
    memory_used: int
    memory_total: int
    prompt_tokens: int
    def __init__(self, received: _Optional[_Iterable[_Union[CodecBytes, _Mapping]]] = ..., drafts_proposed: _Optional[int] = ..., drafts_accepted: _Optional[int] = ..., link_bytes_per_s: _Optional[_Mapping[str, float]] = ..., prefix_queried_tokens: _Optional[int] = ..., prefix_hit_tokens: _Optional[int] = ..., compiling: _Optional[_Iterable[str]] = ..., device: _Optional[str] = ..., memory_used: _Optional[int] = ..., memory_total: _Optional[int] = ..., prompt_tokens: _Optional[int] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("model", "layout", "protocol_version", "codecs", "transports", "running", "waiting", "max_running", "max_waiting", "pages_total", "pages_free", "pages_cached", "draining", "withheld_codecs", "instance", "codec_parameters", "kv_events", "step_cost", "max_batch_tokens", "metrics_port", "metrics_tls", "mixed_batch_tokens", "roles", "kv_cache", "kv_in_clear", "report")
    class CodecParametersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    MAX_WAITING_FIELD_NUMBER: _ClassVar[int]
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PAGES_FREE_FIELD_NUMBER: _ClassVar[int]
    PAGES_CACHED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    WITHHELD_CODECS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    CODEC_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    KV_EVENTS_FIELD_NUMBER: _ClassVar[int]
    STEP_COST_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    METRICS_PORT_FIELD_NUMBER: _ClassVar[int]
    METRICS_TLS_FIELD_NUMBER: _ClassVar[int]
    MIXED_BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_FIELD_NUMBER: _ClassVar[int]
    KV_IN_CLEAR_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    model: ModelInfo
    layout: KVLayout
    protocol_version: int
    codecs: _containers.RepeatedScalarFieldContainer[str]
    transports: _containers.RepeatedScalarFieldContainer[str]
    running: int
    waiting: int
    max_running: int
    max_waiting: int
    pages_total: int
    pages_free: int
    pages_cached: int
    draining: bool
    withheld_codecs: _containers.RepeatedScalarFieldContainer[str]
    instance: int
    codec_parameters: _containers.ScalarMap[str, int]
    kv_events: KVEvents
    step_cost: StepCost
    max_batch_tokens: int
    metrics_port: int
    metrics_tls: bool
    mixed_batch_tokens: int
    roles: _containers.RepeatedScalarFieldContainer[str]
    kv_cache: str
    kv_in_clear: bool
    report: WorkerReport
    def __init__(self, model: _Optional[_Union[ModelInfo, _Mapping]] = ..., layout: _Optional[_Union[KVLayout, _Mapping]] = ..., protocol_version: _Optional[int] = ..., codecs: _Optional[_Iterable[str]] = ..., transports: _Optional[_Iterable[str]] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., max_running: _Optional[int] = ..., max_waiting: _Optional[int] = ..., pages_total: _Optional[int] = ..., pages_free: _Optional[int] = ..., pages_cached: _Optional[int] = ..., draining: _Optional[bool] = ..., withheld_codecs: _Optional[_Iterable[str]] = ..., instance: _Optional[int] = ..., codec_parameters: _Optional[_Mapping[str, int]] = ..., kv_events: _Optional[_Union[KVEvents, _Mapping]] = ..., step_cost: _Optional[_Union[StepCost, _Mapping]] = ..., max_batch_tokens: _Optional[int] = ..., metrics_port: _Optional[int] = ..., metrics_tls: _Optional[bool] = ..., mixed_batch_tokens: _Optional[int] = ..., roles: _Optional[_Iterable[str]] = ..., kv_cache: _Optional[str] = ..., kv_in_clear: _Optional[bool] = ..., report: _Optional[_Union[WorkerReport, _Mapping]] = ...) -> None: ...
