"""Settings of every process: frozen, typed, validated once at start.

A setting comes from a flag, an environment variable (KVRAIL_PREFILL_PORT), a TOML file (--config FILE) or its default,
in this order. An error names the key, the value and the remedy. Nothing is changed after start.

A TOML file describes a whole cluster: keys at the top hold for every process that has them; the tables [router],
[prefill], [decode], [worker] and [up] hold for one and win over the top.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, PositiveInt, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from kvrail.config.origins import environment_of, explain, file_values, flag_name
from kvrail.config.types import (
    ComputeDtype,
    Decode,
    Device,
    KVCache,
    KVDtype,
    LoadFormat,
    Names,
    Networks,
    Origins,
    Port,
    SamplingDefaults,
    Weights,
    Workers,
    check_kv_cache,
    one_role_default,
)
from kvrail.errors import ConfigError

DEMO_MODEL = str(Path(__file__).resolve().parents[2] / "models" / "kvrail-demo")
MAX_FRAME_BYTES = 64 << 20
"""KV of a frame, before encoding; NVLink takes 0.2 ms for it, and larger frames gain nothing."""
FRAMES_IN_MEMORY = 8
"""Frames that a decode worker's transfer memory holds at least: some are received while others are decoded."""
PositiveFloat = Annotated[float, Field(gt=0, le=1e9)]  # timers and peers take no longer durations
NotNegative = Annotated[float, Field(ge=0, le=1e9)]
GAP_LIMIT: float = Field(
    30.0, description="time between two tokens of a stream, in ms, that prompts beside it must keep; 0: no limit"
)

WorkerRole = Literal["prefill", "decode"]


class Settings(BaseSettings):
    """Base of all settings: where values come from, and errors that say which one is wrong."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid")
    table: ClassVar[str]
    """Name of this process's table in a TOML file."""

    @classmethod
    def load(cls, flags: Mapping[str, object] | None = None, config: Path | None = None) -> Self:
        """Settings from `flags` (by field name), the environment, the file `config` and the defaults.

        Raises ConfigError, which names the key, the value and the remedy.
        """
        environment = environment_of(cls.table, cls.model_config["env_prefix"], cls.model_fields)
        tables = {process.table: process.model_fields for process in PROCESSES}
        file = file_values(cls.table, config, tables, WorkerSettings.model_fields) if config else {}
        given = dict(flags or {})
        try:
            return cls(**({k: v for k, v in file.items() if k not in environment} | given))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            key = str(first["loc"][0]) if first["loc"] else ""
            if key in given or not key:
                origin = flag_name(key) if key else cls.table
            elif key in environment:
                origin = environment[key]
            else:
                origin = f"{key} in {config}"
            raise ConfigError(explain(cls.table, cls.model_fields, origin, key, first)) from None


class ServiceSettings(Settings):
    """What every service has."""

    host: str = Field("127.0.0.1", min_length=1, description="address to listen on")
    model: str = Field(DEMO_MODEL, min_length=1, description="model: a local folder or a Hub name (safetensors only)")
    served_model_name: Names = Field(
        (), description="names that clients may use; workers use the first one; default: the last part of --model"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least severe level that is logged"
    )
    log_format: Literal["text", "json"] = Field("text", description="plain lines, or one JSON object a line")
    otlp_endpoint: str = Field(
        "",
        pattern=r"^(https?://.+)?$",
        description="OpenTelemetry collector that receives traces by gRPC, such as http://127.0.0.1:4317; default:"
        " OTEL_EXPORTER_OTLP_ENDPOINT, else no traces",
    )
    grace_period_s: PositiveFloat = Field(20.0, description="seconds that running requests get to finish after SIGTERM")
    tls_ca: str = Field("", description="CA of the services' certificates, PEM (docs/security.md); default: no TLS")
    tls_cert: str = Field("", description="this process's certificate, PEM; read again when it changes (default none)")
    tls_key: str = Field("", description="its key, PEM, without a password (default none)")
    tls_verify: Literal["host", "role"] = Field(
        "host", description="what the certificate of a called service must name: its host or its role"
    )

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names under which clients ask for the model; never empty."""
        return self.served_model_name or (Path(self.model).name,)

    @property
    def model_name(self) -> str:
        """The first of them; router and workers use it among themselves."""
        return self.model_names[0]


class RouterSettings(ServiceSettings):
    """Settings of `kvrail router`."""

    model_config = SettingsConfigDict(env_prefix="KVRAIL_ROUTER_")
    table = "router"

    _one_role = model_validator(mode="before")(one_role_default(()))

    port: Port = Field(8000, description="HTTP port of the API and of /metrics")
    workers: Workers = Field(
        (),
        description="workers that prefill and decode, host:port each, or dns+host:port for all addresses of a name; the"
        " router chooses where each prompt is computed and where it decodes",
    )
    decode_workers: Annotated[Workers, Decode] = Field(
        ("127.0.0.1:7002",),
        description="decode workers, in the same form; default with --workers: none",
    )
    prefill_workers: Workers = Field(
        ("127.0.0.1:7001",),
        description="prefill workers, in the same form; none: decode workers prefill; default with --workers: none",
    )
    api_keys: Names = Field((), repr=False, description="accepted keys, bearer or X-Api-Key; none: no authentication")
    api_keys_file: str = Field(
        "",
        description="TOML file of keys and their limits (kvrail keys add); read again when it changes (default none)",
    )
    tls_http_cert: str = Field(
        "", description="certificate of the HTTP port, PEM; read again when it changes (default none: no TLS)"
    )
    tls_http_key: str = Field("", description="its key, PEM, without a password (default none)")
    admin_port: int = Field(
        -1,
        ge=-1,
        le=65535,
        description="separate port for /metrics, the full /health and /drain; 0: any free one, -1: none",
    )
    metrics_tls: bool = Field(
        False, description="TLS on the admin port; clients need a certificate of the CA, except for /live and /ready"
    )
    admin_host: str = Field("", description="address of the admin port (default: --host)")
    request_timeout_s: PositiveFloat = Field(600.0, description="deadline of one request, in seconds")
    max_concurrent_requests: PositiveInt = Field(
        1024, description="requests at once, including waiting ones; n sequences count as n; above it: 429"
    )
    max_body_bytes: PositiveInt = Field(8 << 20, description="largest HTTP body")
    generation_config: str = Field(
        "auto",
        min_length=1,
        description="default sampling parameters; auto: from the model's generation_config.json; none: OpenAI's"
        " defaults; else a folder with such a file",
    )
    override_generation_config: SamplingDefaults = Field(
        {}, description='values that override it, in JSON, for example {"temperature": 0.6}'
    )
    tool_parser: Literal["auto", "none", "hermes", "llama3_json", "mistral"] = Field(
        "auto", description="format of tool calls; auto: from the chat template"
    )
    reasoning_parser: Literal["auto", "none", "deepseek_r1", "qwen3"] = Field(
        "auto", description="separate reasoning from content; auto: if the chat template has <think>"
    )
    trust_request_chat_template: bool = Field(
        False, description="let requests bring chat templates; only if all clients are trusted"
    )
    client_timeout_s: PositiveFloat = Field(
        60.0,
        description="longest wait for a client that sends a request's body (a second more for each 64 KiB) or reads its"
        " answer; 10 s at most for headers",
    )
    policy: Literal["prefix-aware", "least-load", "power-of-two", "round-robin"] = Field(
        "prefix-aware", description="how workers are chosen (docs/scheduling.md)"
    )
    prefill_wait_s: NotNegative = Field(
        0.2, description="longest wait for a prefill worker, in seconds, until an idle decode worker helps; 0: no limit"
    )
    newcomer_share: float = Field(
        0.1, ge=0, le=0.5, description="share of all places that one client must leave to others"
    )
    slo_ttft_ms: PositiveFloat = Field(
        500.0, description="time to the first token, in ms, that the router keeps where workers prefill and decode"
    )
    slo_gap_ms: NotNegative = GAP_LIMIT
    priorities: bool = Field(
        False, description="let requests set a priority among their client's requests; lower is earlier"
    )
    stream_head_s: PositiveFloat = Field(
        0.035,
        description="seconds until a stream's headers leave; an earlier failure has a status, a later is an event",
    )
    keep_alive_s: NotNegative = Field(
        15.0, description="seconds without an event until an empty line is sent on a stream; 0: never"
    )
    trusted_proxies: Networks = Field(
        (),
        description="addresses or networks of proxies whose X-Forwarded-For and X-Forwarded-Proto name the client;"
        " none: the client is the connection's address",
    )
    cors_origins: Origins = Field((), description="origins whose pages may use the API in a browser; *: any")
    stored_responses_mib: int = Field(
        64, ge=0, description="memory for stored /v1/responses, in MiB; the oldest ones are dropped first; 0: none"
    )
    status_page: Literal["auto", "open", "off"] = Field(
        "auto",
        description="the page at /; auto: with API keys, visitors without one see what /health shows; open: everything",
    )


class WorkerSettings(ServiceSettings):
    """What all workers share."""

    roles: ClassVar[tuple[WorkerRole, ...]]
    """What the worker does."""

    metrics_port: Port = Field(0, description="HTTP port of /metrics and /health; 0: any free one")
    metrics_tls: bool = Field(
        False, description="TLS on the metrics port; /metrics then needs a certificate of the CA, /health does not"
    )
    device: Device = Field("cpu", description="cpu, cuda or cuda:N")
    dtype: ComputeDtype = Field("auto", description="compute type; auto: float32 on a CPU, bfloat16 on CUDA")
    kv_dtype: KVDtype = Field("bfloat16", description="element type of the KV pages; equal on every worker")
    kv_quality: str = Field("", description="for kv_cache auto:BOUND: figures of kvrail quality --json (default none)")
    kv_cache: KVCache = Field(
        "plain",
        description="full pages: lossless in 3/4 of the memory; the others are lossy; auto:BOUND: see kv_quality",
    )
    _kv_cache_suits = field_validator("kv_cache")(classmethod(check_kv_cache))
    load_format: LoadFormat = Field("safetensors", description="dummy: random weights of a fixed seed, for benchmarks")
    weights: Weights = Field("plain", description="compact, tbe: losslessly in 71 % of bfloat16's memory; Hopper GPUs")
    page_size: PositiveInt = Field(64, description="tokens per page; equal on every worker")
    kv_memory_gib: float = Field(
        0.0,
        ge=0,
        description="memory for pages in GiB; 0: 2 GiB on a CPU; on CUDA 85 % of what is free, a tenth of the GPU left",
    )
    max_model_len: int = Field(0, ge=0, description="context limit in tokens; 0: the model's own")
    max_batch_tokens: PositiveInt = Field(2048, description="most tokens in one engine step")
    mixed_batch_tokens: int = Field(
        0,
        ge=0,
        description="most tokens in a step that mixes prompts with decoding sequences; 0: 256 on a CPU, 512 on CUDA",
    )
    step_timeout_s: PositiveFloat = Field(
        300.0, description="longest engine step or event-loop turn, in seconds; a worker that takes longer exits"
    )
    max_running: int = Field(
        0, ge=0, description="most sequences in a step; 0: 64; 64 to 256, by its pages, on a GPU that decodes"
    )
    max_waiting: PositiveInt = Field(256, description="most waiting requests; more are refused as overload")
    prefix_cache: bool = Field(True, description="reuse pages of finished requests for prompts with the same beginning")
    eager: bool = Field(False, description="on CUDA, run steps without CUDA graphs and without torch.compile")
    invariant: Literal["auto", "on", "off"] = Field(
        "auto",
        description="batch-invariant results, tested at start; auto: where model and device allow it, on: refuse to"
        " start otherwise",
    )
    transport: str = Field(
        "auto", description="how KV crosses: ucx, tcp, or a plugin's name; auto: ucx where both ends have it, else tcp"
    )
    ucx_in_clear: bool = Field(
        False,
        description="allow ucx with TLS although it does not encrypt KV: an observer of that network can read prompts",
    )
    ucx_host: str = Field(
        "", description="name or address of this machine on the one network that ucx may use; default: all of them"
    )
    codebook: str = Field(
        "", description="codebook file of codec splitzip, equal on every worker; default: the built-in one"
    )
    transfer_timeout_s: PositiveFloat = Field(
        60.0,
        description="longest silence of a transfer's other end, in seconds, until it counts as lost; equal everywhere",
    )

    @property
    def max_frame_bytes(self) -> int:
        """Largest KV of a frame, before encoding."""
        return MAX_FRAME_BYTES


class PrefillSettings(WorkerSettings):
    """Settings of `kvrail prefill`."""

    model_config = SettingsConfigDict(env_prefix="KVRAIL_PREFILL_")
    table = "prefill"
    roles: ClassVar[tuple[WorkerRole, ...]] = ("prefill",)

    port: Port = Field(7001, description="gRPC port")
    data_port: Port = Field(0, description="TCP port on which transport tcp serves KV; 0: any free one")
    transfer_memory_mib: PositiveInt = Field(
        4096,
        description="memory for later stages that wait until first stages are sent, in MiB, per decode machine",
    )

    @property
    def max_waiting_bytes(self) -> int:
        """Most bytes of later stages that wait until first stages are sent, for each decode machine."""
        return self.transfer_memory_mib << 20


class DecodeSettings(WorkerSettings):
    """Settings of `kvrail decode`."""

    model_config = SettingsConfigDict(env_prefix="KVRAIL_DECODE_")
    table = "decode"
    roles: ClassVar[tuple[WorkerRole, ...]] = ("decode",)

    port: Port = Field(7002, description="gRPC port")
    codec: str = Field(
        "auto",
        min_length=1,
        description="KV codec; auto: the one that gives tokens soonest on the measured link",
    )
    slo_gap_ms: NotNegative = GAP_LIMIT
    allow_lossy: bool = Field(False, description="allow lossy KV codecs, in --codec and in requests")
    max_drafts: int = Field(
        64, ge=0, description="most tokens drafted while later stages of the KV are transferred; 0: none"
    )
    local_prefill_tokens: int = Field(
        64,
        ge=-1,
        description="prompts with at most this many uncached tokens are prefilled by the decode worker; -1: if that is "
        "measured to be faster than a fetch",
    )
    allowed_prefill_workers: Names = Field(
        (),
        description="prefill workers that requests may name: hosts, host:port or networks; none: any",
    )
    transfer_memory_mib: PositiveInt = Field(
        512,
        description="receive buffer for KV, in MiB, on the host and on a GPU that receives KV; a frame has an eighth",
    )

    @property
    def max_frame_bytes(self) -> int:
        """Largest KV of a frame, before encoding."""
        return min(MAX_FRAME_BYTES, (self.transfer_memory_mib << 20) // FRAMES_IN_MEMORY)


class BothSettings(DecodeSettings, PrefillSettings):
    """Settings of `kvrail worker`, which prefills and decodes."""

    model_config = SettingsConfigDict(env_prefix="KVRAIL_WORKER_")
    table = "worker"
    roles = ("prefill", "decode")

    port: Port = Field(7003, description="gRPC port")
    transfer_memory_mib: PositiveInt = Field(
        512,
        description="receive buffer for KV, in MiB, on the host and on a GPU that receives KV; a frame has an eighth;"
        " later stages that wait to be sent have eight times as much, per decode machine",
    )

    @property
    def max_waiting_bytes(self) -> int:
        """Most bytes of later stages that wait until first stages are sent, for each decode machine."""
        return self.transfer_memory_mib * FRAMES_IN_MEMORY << 20


class UpSettings(Settings):
    """Settings of `kvrail up`, which runs a whole cluster on one machine."""

    model_config = SettingsConfigDict(env_prefix="KVRAIL_UP_")
    table = "up"

    _one_role = model_validator(mode="before")(one_role_default(0))

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: CUDA where a GPU is found, else the CPU")
    prefill_workers: int = Field(1, ge=0, le=64, description="0: decode workers prefill; default with --workers: 0")
    workers: int = Field(0, ge=0, le=64, description="workers that prefill and decode")
    decode_workers: Annotated[int, Decode] = Field(
        1, ge=0, le=64, description="decode workers; default with --workers: 0"
    )
    metrics_port: Port = Field(9101, description="of the first worker, then counting up; 0, or with --port 0: any free")
    startup_timeout_s: PositiveFloat = Field(600.0, description="longest wait until every process is healthy")
    restarts: int = Field(5, ge=0, description="of a process that keeps exiting within a minute, before all stop")


PROCESSES: tuple[type[Settings], ...] = (RouterSettings, PrefillSettings, DecodeSettings, BothSettings, UpSettings)
"""Every process that has settings."""
