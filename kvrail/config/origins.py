"""Where values of settings come from: flags, the environment and TOML files, and what an error says of them."""

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from kvrail.errors import ConfigError

Fields = Mapping[str, FieldInfo]
"""Settings of a process, by name."""


def flag_name(field: str) -> str:
    """The flag that sets `field`."""
    return "--" + field.replace("_", "-")


def environment_of(table: str, prefix: str, fields: Fields) -> dict[str, str]:
    """Environment variables of a process that are set, by field; one that no field knows is an error."""
    known = {f"{prefix}{name.upper()}": name for name in fields}
    found = {}
    for variable in sorted(os.environ):
        if not variable.upper().startswith(prefix):
            continue
        if variable.upper() not in known:
            remedy = nearest(variable, known) or "unset it"
            if re.search(r"_SERVICE_|_PORT_\d+_", variable):
                remedy = "Kubernetes made it of a Service: set enableServiceLinks: false in the pod"
            raise ConfigError(f"environment variable {variable} names no setting of kvrail {table}; {remedy}")
        found[known[variable.upper()]] = variable
    return found


def file_values(table: str, path: Path, tables: Mapping[str, Fields], common: Iterable[str]) -> dict[str, Any]:
    """What a TOML file says for a process. tables: of all processes; common: keys that may stand at its top."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}; name a readable TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is not TOML: {error}; correct the file") from None
    top = {key: value for key, value in content.items() if key not in tables}
    for key in top:
        if key not in common:
            remedy = nearest(key, common) or f"tables are {', '.join(f'[{name}]' for name in tables)}"
            owners = [f"[{name}]" for name, fields in tables.items() if key in fields]
            if owners:
                remedy = f"it belongs into {' or '.join(owners)}"
            raise ConfigError(f"{key} in {path} is no setting of all processes; {remedy}")
    own = content.get(table, {})
    if not isinstance(own, dict):
        raise ConfigError(f"{table} = {own!r} in {path} is no table; write [{table}] and the keys below it")
    return {key: value for key, value in top.items() if key in tables[table]} | own


def nearest(name: str, known: Iterable[str]) -> str:
    """A question that names the known name most like `name`; empty where none is."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else ""


def explain(table: str, fields: Fields, origin: str, key: str, error: ErrorDetails) -> str:
    """One line: where the value came from, the value, what is accepted."""
    if error["type"] == "extra_forbidden":
        remedy = nearest(key, fields) or f"kvrail {table} --help lists all settings"
        return f"{origin} is no setting of kvrail {table}; {remedy}"
    field = fields.get(key)
    value = "the value" if field is None or not field.repr else repr(error["input"])
    message = error["msg"].removeprefix("Value error, ")
    if not key:
        return f"{origin}: {message}"
    about = f" ({field.description})" if field is not None else ""
    return f"{origin}: {value} is not accepted: {message[:1].lower()}{message[1:]}{about}"
