"""Types of settings' values, and what is accepted for each."""

import ipaddress
import json
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo
from pydantic_settings import NoDecode

from kvrail.config.kv_quality import AUTO, form_under
from kvrail.values.kv_cache import ExactForm, LossyForm, is_exact

T = TypeVar("T")
DNS = "dns+"
"""Before host:port: workers have whatever addresses that name has at the time."""


def _split(value: object) -> object:
    """'a, b' as ('a', 'b'): lists are written with commas in flags and environment variables."""
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def _check_address(value: str) -> str:
    host, _, port = value.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) <= 65535:
        raise ValueError("write each address as host:port, for example 127.0.0.1:7001")
    return value


def _check_workers(value: str) -> str:
    _check_address(value.removeprefix(DNS))
    return value


def _check_device(value: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", value):
        raise ValueError("write cpu, cuda or cuda:N")
    return value


def _check_origin(value: str) -> str:
    if not re.fullmatch(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+", value):
        raise ValueError("write each origin as scheme://host or scheme://host:port, without a path, or *")
    return value


def _check_network(value: str) -> str:
    try:
        ipaddress.ip_network(value)
    except ValueError as error:
        raise ValueError(f"write each proxy as an address or a network, for example 10.0.0.0/8 ({error})") from None
    return value


def _parse_object(value: object) -> object:
    """An object's JSON, as flags and environment variables have it; a TOML file has a table."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"write an object in JSON ({error})") from None


def one_role_default(none: object) -> Callable[[Any], Any]:
    """A validator of all settings: where `workers` of both roles are given, those of one role are none by default."""

    def complete(given: dict[str, Any]) -> dict[str, Any]:
        some = given.get("workers") not in (None, "", "0", 0, (), [])
        return {"decode_workers": none, "prefill_workers": none} | given if some else given

    return complete


def check_kv_cache(worker: Any, value: str) -> str:
    """A validator of a worker's form of pages: one that prefills alone keeps exact pages."""
    if worker.roles == ("prefill",) and not is_exact(value):
        raise ValueError(
            f"{value} loses bits, and prompts are computed over exact pages: only workers that decode keep such pages;"
            " set it for them alone, in table [decode], and plain or lossless here"
        )
    return value


def _choose_form(value: object, info: ValidationInfo) -> object:
    """auto:BOUND as the form that it stands for; after the setting `kv_quality`."""
    if not isinstance(value, str) or not value.startswith(AUTO.rstrip(":")):
        return value
    return form_under(value, info.data.get("kv_quality", ""))


def _check_decode(value: T, info: ValidationInfo) -> T:
    if not (value or info.data.get("workers")):
        raise ValueError("some worker must decode; give --workers or --decode-workers")
    return value


Decode = AfterValidator(_check_decode)
"""Of decode workers, after the setting `workers`: there are some of either."""
Port = Annotated[int, Field(ge=0, le=65535)]
Workers = Annotated[tuple[Annotated[str, AfterValidator(_check_workers)], ...], NoDecode, BeforeValidator(_split)]
Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
Origins = Annotated[tuple[Annotated[str, AfterValidator(_check_origin)], ...], NoDecode, BeforeValidator(_split)]
Networks = Annotated[tuple[Annotated[str, AfterValidator(_check_network)], ...], NoDecode, BeforeValidator(_split)]
SamplingDefaults = Annotated[dict[str, int | float | None], NoDecode, BeforeValidator(_parse_object)]
Device = Annotated[str, AfterValidator(_check_device)]
KVCache = Annotated[Literal[ExactForm, LossyForm], BeforeValidator(_choose_form)]
KVDtype = Literal["bfloat16", "float16", "float32", "float8_e5m2", "float8_e4m3fn"]
ComputeDtype = Literal["auto", "float32", "bfloat16"]
LoadFormat = Literal["safetensors", "dummy"]
Weights = Literal["plain", "compact", "tbe"]
