"""`kvrail up`: a router and its workers on this machine, started, watched and stopped together."""

import argparse
import asyncio
import json
import shlex
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path

from pydantic.fields import FieldInfo

from kvrail.cli.cluster.gpus import visible_gpus
from kvrail.cli.cluster.output import Output
from kvrail.cli.cluster.plan import CHOSEN, Cluster, plan_cluster
from kvrail.cli.flags import Commands, add_command, add_config, add_settings, given_flags
from kvrail.cli.role import check_worker_installed
from kvrail.config.settings import BothSettings, DecodeSettings, PrefillSettings, RouterSettings, UpSettings

SUMMARY = "run a whole cluster on this machine"
EPILOG = """A flag of a service goes to every service that has it; --kv-cache int8, int4, rot3 and kvcomp, to workers
that decode. A TOML file sets it for one alone, in its tables [router], [prefill], [decode] and [worker], and so does an
environment variable: --log-level of the router is KVRAIL_ROUTER_LOG_LEVEL.
Ports and devices of the workers are chosen: free ports, and the GPUs in turn.

examples:
  kvrail up                                        the demo model, one prefill and one decode worker
  kvrail up --model Qwen/Qwen3-8B --device cuda    workers spread over the GPUs of this machine
  kvrail up --prefill-workers 2 --decode-workers 2 --port 9000
  kvrail up --workers 2                            two workers that prefill and decode
  kvrail up --config cluster.toml"""
SERVE_SUMMARY = "run a whole cluster with MODEL on this machine: kvrail up --model MODEL"
SERVE_EPILOG = """All flags of kvrail up but --model.

examples:
  kvrail serve Qwen/Qwen3-8B --device cuda
  kvrail serve ./my-model
  kvrail ./my-model"""


def add_commands(commands: Commands) -> None:
    """Add `kvrail up` and `kvrail serve`."""
    with add_command(commands, "up", SUMMARY, EPILOG, run) as parser:
        add_config(parser)
        add_settings(parser, up_fields())
    with add_command(commands, "serve", SERVE_SUMMARY, SERVE_EPILOG, run, "MODEL") as parser:
        parser.add_argument("model", metavar="MODEL", help="a folder with the model's files, or a Hub name")
        add_config(parser)
        add_settings(parser, {name: field for name, field in up_fields().items() if name != "model"})


def up_fields() -> dict[str, FieldInfo]:
    """Settings that `kvrail up` takes as flags: its own, the router's address, and what it hands to the services."""
    services = (
        RouterSettings.model_fields
        | BothSettings.model_fields
        | PrefillSettings.model_fields
        | DecodeSettings.model_fields
    )
    handed = {name: field for name, field in services.items() if name not in CHOSEN}
    address = {name: RouterSettings.model_fields[name] for name in ("host", "port")}
    return {**handed, **address, **UpSettings.model_fields}


def run(arguments: argparse.Namespace) -> int:
    """Start the cluster and keep it until a signal; returns 0. Raises ConfigError and ClusterError."""
    check_worker_installed("up")
    with ExitStack() as held:
        cluster = plan_cluster(given_flags(arguments, up_fields()), arguments.config, visible_gpus(), held)
        output = Output(sys.stdout, prefix=cluster.router.log_format == "text")
        names = ", ".join(process.name for process in cluster.processes)
        output.say(f"starting {names} with {cluster.router.model} on {cluster.device}")
        asyncio.run(_supervise(cluster, output))
    return 0


async def _supervise(cluster: Cluster, output: Output) -> None:
    from kvrail.cli.cluster.supervisor import Supervisor  # brings an HTTP client: not for --help and the services

    supervisor = Supervisor(
        output,
        startup_timeout_s=cluster.startup_timeout_s,
        grace_period_s=cluster.router.grace_period_s,
        restarts=cluster.restarts,
    )
    await supervisor.run(cluster.processes, lambda: output.say(welcome(cluster)))


FIRST_CHAT = (
    {"role": "user", "content": "What is a pipe?"},
    {
        "role": "assistant",
        "content": "A pipe connects two programs: what the first one writes, the second one reads. The shell makes one"
        " for each | in a command line, and both programs run at the same time. When the pipe is full, the writer"
        " waits; when it is empty, the reader waits.",
    },
    {"role": "user", "content": "What is grep?"},
)
"""Long enough that a prefill worker computes it and its KV crosses: more than the default of --local-prefill-tokens."""


def program() -> str:
    """How a shell here starts this program: by its name where that is on the path, else by its path."""
    installed = Path(sys.executable).with_name("kvrail")
    found = shutil.which("kvrail")
    if not installed.exists():
        return "kvrail" if found else f"{shlex.quote(sys.executable)} -m kvrail"
    if found and Path(found).resolve() == installed.resolve():
        return "kvrail"
    inside = installed.is_relative_to(Path.cwd())
    return shlex.quote(str(installed.relative_to(Path.cwd()) if inside else installed))


def welcome(cluster: Cluster) -> str:
    """What to try first, once the cluster is healthy."""
    model = cluster.router.model_name
    body = json.dumps({"model": model, "temperature": 0, "messages": FIRST_CHAT})
    with_key = bool(cluster.router.api_keys or cluster.router.api_keys_file)
    key = ' -H "Authorization: Bearer $KVRAIL_API_KEY"' if with_key else ""
    metrics = "\n".join(f"  {process.name:<10} {process.url}/metrics" for process in cluster.processes)
    return f"""
{model} is served on {cluster.url}/v1

try:
  {program()} chat --url {cluster.url}
  curl -s {cluster.url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d {shlex.quote(body)}
The answer's usage shows under "kvrail" how many bytes of KV crossed: kv_bytes, compressed from kv_raw_bytes.

In a browser: the status page at {cluster.url}/, the API at {cluster.url}/docs.

metrics:
{metrics}

Ctrl-C stops the cluster.
"""
