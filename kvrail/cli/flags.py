"""Command-line flags made of settings, so that a flag, its default and its meaning are written once."""

import argparse
import difflib
import json
import os
import shutil
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeAlias, get_args, get_origin

from pydantic.fields import FieldInfo

from kvrail.config.origins import flag_name
from kvrail.config.settings import DEMO_MODEL, Settings

GROUPS = {
    "cluster": "workers prefill_workers decode_workers startup_timeout_s restarts",
    "network": "host port metrics_port admin_host admin_port",
    "model": "model served_model_name load_format max_model_len generation_config override_generation_config"
    " tool_parser reasoning_parser",
    "compute": "device dtype weights max_batch_tokens mixed_batch_tokens max_running max_waiting step_timeout_s eager"
    " invariant",
    "KV cache": "kv_dtype kv_cache kv_quality page_size kv_memory_gib prefix_cache",
    "KV transfer": "local_prefill_tokens codec allow_lossy max_drafts codebook transport ucx_in_clear ucx_host"
    " data_port transfer_memory_mib transfer_timeout_s allowed_prefill_workers",
    "requests": "api_keys api_keys_file request_timeout_s max_concurrent_requests prefill_wait_s newcomer_share"
    " slo_ttft_ms slo_gap_ms priorities trust_request_chat_template policy stored_responses_mib status_page",
    "connections": "trusted_proxies cors_origins max_body_bytes client_timeout_s stream_head_s keep_alive_s",
    "security": "tls_ca tls_cert tls_key tls_verify metrics_tls tls_http_cert tls_http_key",
    "process": "log_level log_format otlp_endpoint grace_period_s",
}
"""The settings of each group of flags, in the order in which help shows them."""
OTHER = "other"
HELP_WIDTH = 140
URL = "http://127.0.0.1:8000"

Commands: TypeAlias = "argparse._SubParsersAction[OneLineErrors]"


class OneLineErrors(argparse.ArgumentParser):
    """A parser whose errors are one line, with the nearest flag where one is misspelt, and exit status 2."""

    def error(self, message: str) -> NoReturn:
        """Write `message` and exit with status 2."""
        self.exit(2, f"{self.prog}: {message}\n")

    def parse(self, argv: list[str] | None) -> argparse.Namespace:
        """Parse `argv`; an argument that is not known is an error with the nearest flag as a hint."""
        found, unknown = self.parse_known_args(argv)
        if unknown:
            prog = getattr(found, "prog", self.prog)
            near = difflib.get_close_matches(
                unknown[0].partition("=")[0], getattr(found, "known_flags", ()), n=1, cutoff=0.75
            )
            remedy = f"did you mean {near[0]}?" if near else f"{prog} --help lists all flags"
            self.exit(2, f"{prog}: unknown argument {unknown[0]}; {remedy}\n")
        return found


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """One line a flag where the terminal is wide enough; examples as they are written."""

    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size((HELP_WIDTH, 24)).columns, HELP_WIDTH)
        super().__init__(prog, max_help_position=32, width=width)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, argparse.BooleanOptionalAction):
            return f"--[no-]{action.option_strings[0].removeprefix('--')}"
        return super()._format_action_invocation(action)


@contextmanager
def add_command(
    commands: Commands,
    name: str,
    summary: str,
    epilog: str,
    run: Callable[[argparse.Namespace], int],
    operands: str = "",
) -> Iterator[argparse.ArgumentParser]:
    """Add the command `name`, which calls `run`; its flags are added inside the `with` block."""
    parser = commands.add_parser(
        name,
        usage=f"kvrail {name} [FLAG ...]{f' {operands}' if operands else ''}",
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=epilog,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    yield parser
    flags = tuple(flag for action in parser._actions for flag in action.option_strings)
    parser.set_defaults(run=run, prog=parser.prog, known_flags=flags)


def add_settings(parser: argparse.ArgumentParser, fields: Mapping[str, FieldInfo]) -> None:
    """Add one flag for each of `fields`, in groups; a flag that is not given leaves no trace in the namespace."""
    titles = {name: title for title, names in GROUPS.items() for name in names.split()}
    order = {name: place for place, name in enumerate(titles)}
    for title in (*GROUPS, OTHER):
        names = [name for name in fields if titles.get(name, OTHER) == title]
        if names:
            group = parser.add_argument_group(title)
            for name in sorted(names, key=lambda name: order.get(name, 0)):
                _add_flag(group, name, fields[name])


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add --config."""
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="TOML file with settings; flags and environment win (default none)"
    )


def add_measured(group: Any, dtypes: Sequence[str]) -> None:
    """Add the flags of commands that measure a model's KV on the user's text. dtypes: those that --kv-dtype takes."""
    group.add_argument(
        "--model",
        default=DEMO_MODEL,
        metavar="MODEL",
        help="model: a local folder or a Hub name (safetensors only; default the demo model)",
    )
    group.add_argument(
        "--text", action="append", required=True, type=Path, metavar="FILE", help="UTF-8 text; may be repeated"
    )
    group.add_argument(
        "--kv-dtype",
        default="bfloat16",
        choices=dtypes,
        metavar="TYPE",
        help=f"element type of the KV pages, a worker's --kv-dtype ({' | '.join(dtypes)}; default bfloat16)",
    )
    group.add_argument(
        "--device", default="cpu", metavar="DEVICE", help="where to compute: cpu, cuda or cuda:N (default cpu)"
    )


def add_server(group: Any, what: str = "router", *, model: bool = True) -> None:
    """Add the flags by which a command finds a running server. what: it is. model: whether it is asked for one."""
    group.add_argument("--url", default=URL, metavar="URL", help=f"address of the {what} (default {URL})")
    group.add_argument("--api-key", metavar="KEY", help="bearer key (default: the variable KVRAIL_API_KEY)")
    if model:
        group.add_argument("--model", metavar="NAME", help="which model to ask (default: the first that is served)")


def api_key(arguments: argparse.Namespace) -> str:
    """The key to send; empty: none."""
    given: str | None = arguments.api_key
    return os.environ.get("KVRAIL_API_KEY", "") if given is None else given


def given_flags(arguments: argparse.Namespace, names: Iterable[str]) -> dict[str, object]:
    """Which of the settings `names` were given as flags, and their values."""
    return {name: value for name, value in vars(arguments).items() if name in set(names)}


def flag_arguments(values: Mapping[str, object]) -> list[str]:
    """`values` of settings as command-line arguments; what `given_flags` reads back."""
    arguments = []
    for name, value in values.items():
        if isinstance(value, bool):
            arguments.append(flag_name(name) if value else f"--no-{flag_name(name)[2:]}")
        else:
            arguments.append(f"{flag_name(name)}={_text(value)}")
    return arguments


def _text(value: object) -> str:
    """A value as a flag has it; what kvrail/config/types.py reads."""
    if isinstance(value, dict):
        return json.dumps(value)
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def environment_help(process: type[Settings]) -> str:
    """How the settings of `process` are set by environment variables, for the end of a help page."""
    prefix = process.model_config["env_prefix"]
    return f"Each flag can be set by an environment variable too: --log-level is {prefix}LOG_LEVEL."


def _add_flag(group: Any, name: str, field: FieldInfo) -> None:
    described = f"{field.description}{_facts(field)}".replace("%", "%%")
    if field.annotation is bool:
        group.add_argument(
            flag_name(name), action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=described
        )
        return
    group.add_argument(flag_name(name), metavar=_metavar(field.annotation), default=argparse.SUPPRESS, help=described)


def _metavar(kind: object) -> str:
    if get_origin(kind) in (tuple, types.UnionType):
        return "A,B,…"
    return {int: "N", float: "X"}.get(kind, "VALUE") if isinstance(kind, type) else "VALUE"


def _facts(field: FieldInfo) -> str:
    """What may be given and what holds where nothing is given, in brackets."""
    value = field.default
    if value == DEMO_MODEL:
        shown = "the demo model"
    elif isinstance(value, bool):
        shown = "on" if value else "off"
    elif isinstance(value, tuple | dict):
        shown = ",".join(value) or ("" if "default: " in str(field.description) else "none")
    else:
        shown = f"{value:g}" if isinstance(value, float) else str(value)
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    facts = [" | ".join(choices)] if len(choices) > 1 else []
    if shown:
        facts.append(f"default {shown}")
    return f" ({'; '.join(facts)})" if facts else ""
