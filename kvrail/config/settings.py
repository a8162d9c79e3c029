"""Settings of every process: frozen, typed, validated once at start.

A setting comes from a flag, an environment variable (KVRAIL_PREFILL_PORT), a TOML file (--config FILE) or its default,
in this order. An error names the key, the value and the remedy. Nothing is changed after start.

A TOML file describes a whole cluster: keys at the top hold for every process that has them; the tables [router],
[prefill], [decode] and [up] hold for one and win over the top.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, SettingsConfigDict

from kvrail.config.types import ComputeDtype, Device, KVDtype, Names, Networks, Origins, Port, SamplingDefaults, Workers
from kvrail.errors import ConfigError

DEMO_MODEL = str(Path(__file__).resolve().parents[2] / "models" / "kvrail-demo")


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
        environment = cls._environment()
        file = _file_values(cls, config) if config else {}
        given = dict(flags or {})
        try:
            return cls(**{k: v for k, v in file.items() if k not in environment}, **given)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            key = str(first["loc"][0]) if first["loc"] else ""
            if key in given or not key:
                origin = flag_name(key) if key else cls.table
            elif key in environment:
                origin = environment[key]
            else:
                origin = f"{key} in {config}"
            raise ConfigError(explain(cls, origin, key, first)) from None

    @classmethod
    def _environment(cls) -> dict[str, str]:
        """Environment variables of this process that are set, by field; one that no field knows is an error."""
        prefix = cls.model_config["env_prefix"]
        known = {f"{prefix}{name.upper()}": name for name in cls.model_fields}
        found = {}
        for variable in sorted(os.environ):
            if not variable.upper().startswith(prefix):
                continue
            if variable.upper() not in known:
                remedy = _nearest(variable, known) or "unset it"
                if re.search(r"_SERVICE_|_PORT_\d+_", variable):
                    remedy = "Kubernetes made it of a Service: set enableServiceLinks: false in the pod"
                raise ConfigError(f"environment variable {variable} names no setting of kvrail {cls.table}; {remedy}")
            found[known[variable.upper()]] = variable
        return found


class ServiceSettings(Settings):
    """What every service has."""

    host: str = Field("127.0.0.1", min_length=1, description="address to listen on")
    model: str = Field(DEMO_MODEL, min_length=1, description="model: a local folder or a Hub name (safetensors only)")
    served_model_name: Names = Field(
        (), description="names that clients may use, the first one among workers; default: the model's last path part"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe log line")
    log_format: Literal["text", "json"] = Field("text", description="log lines for people or for machines")
    otlp_endpoint: str = Field(
        "",
        pattern=r"^(https?://.+)?$",
        description="OpenTelemetry collector that gets traces by gRPC, such as http://127.0.0.1:4317; default: what"
        " OTEL_EXPORTER_OTLP_ENDPOINT names, else no traces",
    )
    grace_period_s: PositiveFloat = Field(20.0, description="seconds that running requests get after SIGTERM")
    metrics_names: Literal["kvrail", "vllm", "both"] = Field(
        "kvrail", description="whose names /metrics has; /metrics/vllm has vLLM's whatever this says"
    )
    tls_ca: str = Field("", description="CA of the services' certificates, PEM (docs/security.md); default: no TLS")
    tls_cert: str = Field("", description="this process's certificate, PEM; read again when it changes (default none)")
    tls_key: str = Field("", description="its key, PEM, without a password (default none)")
    tls_verify: Literal["host", "role"] = Field(
        "host", description="what a service's certificate must name: the host by which it is called, or its role"
    )

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names under which clients ask for the model; never empty."""
        return self.served_model_name or (Path(self.model).name,)

    @property
    def model_name(self) -> str:
        """The first of them, which router and workers use between each other."""
        return self.model_names[0]


class RouterSettings(ServiceSettings):
    """Settings of `kvrail router`."""

    model_config = SettingsConfigDict(env_prefix="KVRAIL_ROUTER_")
    table = "router"

    port: Port = Field(8000, description="HTTP port of the API and of /metrics")
    decode_workers: Workers = Field(
        ("127.0.0.1:7002",),
        min_length=1,
        description="decode workers, host:port each, or dns+host:port for all addresses of a name",
    )
    prefill_workers: Workers = Field(
        ("127.0.0.1:7001",), description="prefill workers, written likewise; none: decode workers prefill"
    )
    dns_interval_s: PositiveFloat = Field(2.0, description="seconds between two looks at a name written dns+host:port")
    api_keys: Names = Field((), repr=False, description="accepted keys, bearer or X-Api-Key; none: no authentication")
    api_keys_file: str = Field(
        "",
        description="TOML file of keys with names and limits (kvrail keys add); read again when it changes"
        " (default none)",
    )
    ssl_cert: str = Field(
        "", description="certificate of the HTTP port, PEM; read again when it changes (default none: no TLS)"
    )
    ssl_key: str = Field("", description="its key, PEM, without a password (default none)")
    admin_port: int = Field(
        -1,
        ge=-1,
        le=65535,
        description="port of its own for /metrics, the whole /health and /drain; 0: any free one, -1: none",
    )
    metrics_tls: bool = Field(
        False, description="admin port under TLS, for certificates of the CA; but /live, /ready for all"
    )
    admin_host: str = Field("", description="address of the admin port (default: --host)")
    request_timeout_s: PositiveFloat = Field(600.0, description="deadline of one request, in seconds")
    max_concurrent_requests: PositiveInt = Field(
        1024, description="requests at once, waiting ones included, one of n sequences counted n times; beyond it: 429"
    )
    max_connections: PositiveInt = Field(4096, description="connections of clients at once; more are answered 503")
    max_body_bytes: PositiveInt = Field(8 << 20, description="largest HTTP body")
    generation_config: str = Field(
        "auto",
        min_length=1,
        description="sampling of requests that do not say; auto: as the model's generation_config.json has it; none:"
        " OpenAI's defaults; else a folder with such a file",
    )
    override_generation_config: SamplingDefaults = Field(
        {}, description='values that win over it, in JSON, for example {"temperature": 0.6}'
    )
    tool_parser: Literal["auto", "none", "hermes", "llama3_json", "mistral"] = Field(
        "auto", description="form of tool calls; auto: the chat template's"
    )
    reasoning_parser: Literal["auto", "none", "deepseek_r1", "qwen3"] = Field(
        "auto", description="split reasoning off; auto: where the template has <think>"
    )
    trust_request_chat_template: bool = Field(False, description="requests may bring chat templates; trust all clients")
    head_timeout_s: PositiveFloat = Field(10.0, description="seconds in which a request's headers must have come")
    body_timeout_s: PositiveFloat = Field(
        60.0, description="seconds in which a request's body must have come, and one more for each 64 KiB of it"
    )
    write_timeout_s: PositiveFloat = Field(
        60.0, description="seconds for which a client may read nothing of its answer; then its request ends"
    )
    policy: Literal["prefix-aware", "least-load", "power-of-two", "round-robin"] = Field(
        "prefix-aware", description="how workers are chosen (docs/scheduling.md)"
    )
    prefill_wait_s: float = Field(
        0.5,
        ge=0,
        description="seconds that a prompt waits for a prefill worker at most, as far as a decode worker has time to"
        " compute it sooner; 0: as long as it takes",
    )
    newcomer_share: float = Field(
        0.1, ge=0, le=0.5, description="share of all room that one client's requests leave to other clients"
    )
    priorities: bool = Field(
        False, description="let requests name a priority among their client's own; lower is earlier"
    )
    stream_head_s: PositiveFloat = Field(
        0.035, description="seconds after which a stream's headers leave; a failure before has a status, later an event"
    )
    keep_alive_s: float = Field(
        15.0, ge=0, description="seconds without an event after which a stream gets an empty line; 0: none"
    )
    trusted_proxies: Networks = Field(
        (),
        description="addresses or networks of proxies that may say, by X-Forwarded-For and X-Forwarded-Proto, who"
        " asks; none: the connection's address is the client's",
    )
    cors_origins: Origins = Field((), description="origins whose pages may use the API in a browser; *: any")
    stored_responses: int = Field(1024, ge=0, description="responses that /v1/responses keeps, at most; 0: none")
    stored_responses_mib: PositiveInt = Field(64, description="memory for them, in MiB; the oldest ones make room")
    status_page: Literal["auto", "open", "off"] = Field(
        "auto", description="the page at /; auto: with API keys, strangers see what /health tells; open: all"
    )
    status_interval_s: PositiveFloat = Field(0.5, description="seconds between two looks at each worker's load")


class WorkerSettings(ServiceSettings):
    """What prefill and decode workers share."""

    metrics_port: Port = Field(0, description="HTTP port of /metrics and /health; 0: any free one")
    metrics_tls: bool = Field(
        False, description="metrics port under TLS; /metrics then asks for a certificate of the CA, /health for none"
    )
    device: Device = Field("cpu", description="cpu, cuda or cuda:N")
    dtype: ComputeDtype = Field("auto", description="type to compute in; auto: float32 on a CPU, bfloat16 on CUDA")
    kv_dtype: KVDtype = Field("bfloat16", description="element type of the KV pages; equal on every worker")
    load_format: Literal["safetensors", "dummy"] = Field(
        "safetensors", description="dummy: random weights from a fixed seed, for benchmarks"
    )
    weights: Literal["plain", "compact", "tbe"] = Field(
        "plain", description="compact, tbe: hold the weights in 71 % of bfloat16's memory, losslessly; Hopper GPUs"
    )
    page_size: PositiveInt = Field(64, description="tokens a page; equal on every worker")
    kv_memory_gib: float = Field(
        0.0,
        ge=0,
        description="memory for pages in GiB; 0: 2 GiB on a CPU; on CUDA 85 % of what is free, a tenth of the GPU left",
    )
    num_pages: int = Field(0, ge=0, description="pages; overrides --kv-memory-gib where not 0")
    max_model_len: int = Field(0, ge=0, description="context limit in tokens; 0: the model's own")
    max_batch_tokens: PositiveInt = Field(2048, description="tokens of one engine step")
    mixed_batch_tokens: int = Field(
        0,
        ge=0,
        description="tokens of a step that computes prompts while other sequences decode; 0: 256 on a CPU; 512 on"
        " CUDA, 256 where there are prefill workers and sixteen or more decode here",
    )
    step_timeout_s: PositiveFloat = Field(
        300.0,
        description="longest step of the engine or turn of the event loop; a worker that takes longer hangs, and ends",
    )
    max_running: PositiveInt = Field(64, description="sequences in one engine step")
    max_waiting: PositiveInt = Field(256, description="requests that may wait; more are refused as overload")
    prefix_cache: bool = Field(True, description="keep finished pages for prompts that begin alike")
    cuda_graphs: bool = Field(True, description="capture steps on CUDA, so that a few launches replay each")
    compile: bool = Field(True, description="fuse each layer's elementwise work with torch.compile on CUDA")
    invariant: Literal["auto", "on", "off"] = Field(
        "auto",
        description="the same bits for a token in any company, tried at start; auto: where model and device allow it,"
        " on: or refuse to start",
    )
    transport: Literal["auto", "ucx", "grpc"] = Field(
        "auto", description="how KV crosses: ucx, or beside grpc by plain sockets; auto: ucx where both ends have it"
    )
    ucx_polling: Literal["auto", "on", "off"] = Field(
        "auto",
        description="ucx polls instead of sleeping, a core of each worker for a shorter way; auto: on a GPU, where the"
        " worker may use 8 cores",
    )
    ucx_in_clear: bool = Field(
        False, description="let ucx carry KV beside TLS, unencrypted: whoever reads that network reads prompts"
    )
    codebook: str = Field(
        "", description="codebook file of codec splitzip, equal on every worker; default: the one that ships"
    )
    max_frame_bytes: PositiveInt = Field(64 << 20, description="most KV bytes of a frame, before encoding")
    transfer_timeout_s: PositiveFloat = Field(
        60.0,
        description="longest silence of a transfer's other end, which sends nothing or takes nothing, before it counts"
        " as lost; equal on every worker",
    )


class PrefillSettings(WorkerSettings):
    """Settings of `kvrail prefill`."""

    model_config = SettingsConfigDict(env_prefix="KVRAIL_PREFILL_")
    table = "prefill"

    port: Port = Field(7001, description="gRPC port")
    data_port: Port = Field(0, description="TCP port from which KV leaves beside gRPC; 0: any free one")
    held_kv_gib: float = Field(
        4.0,
        gt=0,
        description="memory for later stages that wait for first ones, in GiB for each decode machine",
    )


class DecodeSettings(WorkerSettings):
    """Settings of `kvrail decode`."""

    model_config = SettingsConfigDict(env_prefix="KVRAIL_DECODE_")
    table = "decode"

    port: Port = Field(7002, description="gRPC port")
    codec: str = Field(
        "auto",
        min_length=1,
        description="KV codec to ask for; auto: whichever gives tokens soonest on the link at hand",
    )
    allow_lossy: bool = Field(
        False, description="let the codec and requests name KV codecs that do not restore every bit"
    )
    max_drafts: int = Field(
        64, ge=0, description="tokens drafted while later stages of the KV are on their way; 0: none"
    )
    local_prefill_tokens: int = Field(
        64,
        ge=-1,
        description="prompts with no more uncached tokens than this are prefilled by the decode worker itself; -1: as "
        "many as cost it less than fetching them, as measured",
    )
    local_fallback_tokens: PositiveInt = Field(
        16384, description="tokens of prompts that no prefill worker took and that wait here; more are answered 429"
    )
    allowed_prefill_workers: Names = Field(
        (),
        description="prefill workers that requests may name: hosts (with all their addresses), host:port or networks; "
        "none given: any",
    )
    receive_pool_mib: PositiveInt = Field(
        512, description="memory into which KV arrives, in MiB, on the host and on a GPU that KV reaches directly"
    )


class UpSettings(Settings):
    """Settings of `kvrail up`, which runs a whole cluster on one machine."""

    model_config = SettingsConfigDict(env_prefix="KVRAIL_UP_")
    table = "up"

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: CUDA where a GPU is found, else the CPU")
    prefill_workers: int = Field(1, ge=0, le=64, description="prefill workers; 0: decode workers prefill")
    decode_workers: int = Field(1, ge=1, le=64, description="decode workers")
    metrics_port: Port = Field(
        9101,
        description="metrics port of the first worker, the others' follow; 0, or with --port 0: any free ones",
    )
    startup_timeout_s: PositiveFloat = Field(600.0, description="longest wait until every process is healthy")
    restarts: int = Field(
        5,
        ge=0,
        description="a process that ends is started anew; so often in a row, if it ends within a minute, then all stop",
    )


PROCESSES: tuple[type[Settings], ...] = (RouterSettings, PrefillSettings, DecodeSettings, UpSettings)
"""Every process that has settings."""


def flag_name(field: str) -> str:
    """The flag that sets `field`."""
    return "--" + field.replace("_", "-")


def _file_values(cls: type[Settings], path: Path) -> dict[str, Any]:
    """What the TOML file `path` says for `cls`."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}; name a readable TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is not TOML: {error}; correct the file") from None
    tables = {process.table: process for process in PROCESSES}
    top = {key: value for key, value in content.items() if key not in tables}
    common = set(WorkerSettings.model_fields)
    for key in top:
        if key not in common:
            remedy = _nearest(key, common) or f"tables are {', '.join(f'[{table}]' for table in tables)}"
            owners = [f"[{table}]" for table, process in tables.items() if key in process.model_fields]
            if owners:
                remedy = f"it belongs into {' or '.join(owners)}"
            raise ConfigError(f"{key} in {path} is no setting of all processes; {remedy}")
    own = content.get(cls.table, {})
    if not isinstance(own, dict):
        raise ConfigError(f"{cls.table} = {own!r} in {path} is no table; write [{cls.table}] and the keys below it")
    return {key: value for key, value in top.items() if key in cls.model_fields} | own


def _nearest(name: str, known: Mapping[str, object] | set[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else ""


def explain(cls: type[Settings], origin: str, key: str, error: ErrorDetails) -> str:
    """One line: where the value came from, the value, what is accepted."""
    if error["type"] == "extra_forbidden":
        remedy = _nearest(key, set(cls.model_fields)) or f"kvrail {cls.table} --help lists all settings"
        return f"{origin} is no setting of kvrail {cls.table}; {remedy}"
    field = cls.model_fields.get(key)
    value = "the value" if field is None or not field.repr else repr(error["input"])
    message = error["msg"].removeprefix("Value error, ")
    about = f" ({field.description})" if field is not None else ""
    return f"{origin}: {value} is not accepted: {message[:1].lower()}{message[1:]}{about}"
