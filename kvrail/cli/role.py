"""`kvrail router`, `kvrail prefill`, `kvrail decode` and `kvrail worker`: one service in this process."""

import argparse
import importlib
import importlib.util
import os
from functools import partial
from typing import cast

from kvrail.cli.checks import check_model, check_worker
from kvrail.cli.cluster.watch import end_with_parent
from kvrail.cli.flags import Commands, add_command, add_config, add_settings, environment_help, given_flags
from kvrail.config.settings import (
    BothSettings,
    DecodeSettings,
    PrefillSettings,
    RouterSettings,
    ServiceSettings,
    WorkerSettings,
)
from kvrail.errors import ConfigError
from kvrail.runtime import background, loops
from kvrail.telemetry.tracing import check_tracing

ROLES: dict[str, type[ServiceSettings]] = {
    "router": RouterSettings,
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
    "worker": BothSettings,
}
SUMMARIES = {
    "router": "serve the HTTP API and send each request to the workers",
    "prefill": "compute the KV cache of prompts and hand it to decode workers",
    "decode": "generate tokens on KV that prefill workers computed",
    "worker": "do both: compute prompts and generate tokens, as the router chooses",
}
EXAMPLES = {
    "router": "kvrail router --port 8000 --prefill-workers p1:7001,p2:7001 --decode-workers d1:7002",
    "prefill": "kvrail prefill --host 0.0.0.0 --port 7001 --metrics-port 9101 --device cuda:0 --model Qwen/Qwen3-8B",
    "decode": "kvrail decode --host 0.0.0.0 --port 7002 --metrics-port 9102 --device cuda:0 --model Qwen/Qwen3-8B",
    "worker": "kvrail worker --host 0.0.0.0 --port 7003 --metrics-port 9103 --device cuda:0 --model Qwen/Qwen3-8B",
}
SPIN_COUNT = "3000"
"""How often a thread of OpenMP's team looks for work before it sleeps: some 50 us, in which a step on a CPU mostly has
its next product. By default it looks a hundred times as often: where another process takes a core meanwhile, all of
the team waits for the scheduler at every product, and a step takes several times as long."""


def add_commands(commands: Commands) -> None:
    """Add one command a role."""
    for role, settings in ROLES.items():
        epilog = f"{environment_help(settings)}\n\nexample:\n  {EXAMPLES[role]}"
        with add_command(commands, role, SUMMARIES[role], epilog, partial(run, role)) as parser:
            add_config(parser)
            add_settings(parser, settings.model_fields)


def run(role: str, arguments: argparse.Namespace) -> int:
    """Run the service `role` until a signal stops it, and end the process with its exit status.

    A service's own code is imported here and not before: the router must start without torch.
    """
    cls = ROLES[role]
    settings = cls.load(given_flags(arguments, cls.model_fields), arguments.config)
    check_model(settings.model)
    check_tracing(settings.otlp_endpoint)
    if isinstance(settings, WorkerSettings):
        check_worker(settings)
    end_with_parent(settings.grace_period_s)
    if role != "router":
        check_worker_installed(role)
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # read once, when torch is imported
    importlib.import_module("kvrail.runtime.logs").setup(settings.log_level, settings.log_format, role)
    main = loops.import_service(f"kvrail.services.{'router' if role == 'router' else 'worker'}.main")
    return background.end(cast(int, main.run(settings)))


def check_worker_installed(command: str) -> None:
    """Raise ConfigError where what a worker runs on is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(f"torch is not installed, and kvrail {command} needs it; pip install 'kvrail[worker]'")
