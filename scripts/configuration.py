"""Writes docs/configuration.md from kvrail/config/settings.py: `make docs`, or with another file's name."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from kvrail.config.settings import (
    DEMO_MODEL,
    BothSettings,
    DecodeSettings,
    PrefillSettings,
    RouterSettings,
    ServiceSettings,
    Settings,
    UpSettings,
    WorkerSettings,
    flag_name,
)

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
HEAD = """# Configuration

<!-- Written by `make docs` from kvrail/config/settings.py: change the settings there. -->

A setting comes from a flag, an environment variable, a TOML file (`--config FILE`) or its default; the first of these
wins. All three have the same name: `--kv-dtype`, `KVRAIL_DECODE_KV_DTYPE` and `kv_dtype = "float8_e4m3fn"` in the file.
Settings are checked at the start, before anything is loaded, and never change afterwards. No duration may be above 1e9.

A TOML file describes a whole cluster. Settings of every service or of every worker may stand at its top, and hold for
each process that has them. The tables `[router]`, `[prefill]`, `[decode]`, `[worker]` and `[up]` hold for one process
and win over the top:

```toml
model = "Qwen/Qwen3-8B"
page_size = 64

[decode]
device = "cuda:0"
codec = "splitzip-channel"
```

Lists are written with commas. A switch is `--prefix-cache` or `--no-prefix-cache`. `kvrail COMMAND --help` shows the
settings of one process.
"""
GROUPS: tuple[tuple[str, str, type[Settings]], ...] = (
    ("Every service", "The router and all workers have these.", ServiceSettings),
    ("Router", "`kvrail router`; environment variables begin with `KVRAIL_ROUTER_`.", RouterSettings),
    (
        "Every worker",
        "Of prefill workers (`KVRAIL_PREFILL_`), decode workers (`KVRAIL_DECODE_`) and those of both roles"
        " (`KVRAIL_WORKER_`).",
        WorkerSettings,
    ),
    ("Prefill worker", "`kvrail prefill`; environment variables begin with `KVRAIL_PREFILL_`.", PrefillSettings),
    ("Decode worker", "`kvrail decode`; environment variables begin with `KVRAIL_DECODE_`.", DecodeSettings),
    (
        "Worker of both roles",
        "`kvrail worker`, which has the settings of both; environment variables begin with `KVRAIL_WORKER_`.",
        BothSettings,
    ),
    (
        "A cluster on one machine",
        "`kvrail up`; environment variables begin with `KVRAIL_UP_`. It also hands the services' flags on.",
        UpSettings,
    ),
)


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(line for group in GROUPS for line in _section(*group))])


def _section(title: str, about: str, settings: type[Settings]) -> Iterator[str]:
    """A table of the settings that are declared by this class itself."""
    yield from (f"## {title}", "", about, "", "| setting | values | default | meaning |", "|---|---|---|---|")
    for name, field in settings.model_fields.items():
        if name in settings.__annotations__:
            meaning = (field.description or "").replace("|", "\\|")
            yield f"| `{flag_name(name)}` | {_values(field)} | {_default(field)} | {meaning} |"
    yield ""


def _values(field: FieldInfo) -> str:
    kind = field.annotation
    if get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind))
    if get_origin(kind) is tuple:
        return "list"
    return {bool: "switch", int: "number", float: "number"}.get(kind, "text") if isinstance(kind, type) else "text"


def _default(field: FieldInfo) -> str:
    value = field.default
    if value == DEMO_MODEL:
        return "the demo model"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple | dict):
        value = ",".join(value)
    shown = f"{value:g}" if isinstance(value, float) else str(value)
    return f"`{shown}`" if shown else "none"


if __name__ == "__main__":
    (Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE).write_text(page(), encoding="utf-8")
