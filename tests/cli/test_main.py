"""The command line itself: help, errors, and what is imported when."""

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvrail.cli.flags import flag_arguments, given_flags
from kvrail.cli.main import build_parser, main
from kvrail.cli.role import ROLES, SPIN_COUNT
from kvrail.cli.up import up_fields
from kvrail.config.origins import flag_name
from kvrail.config.settings import DecodeSettings, PrefillSettings, RouterSettings

ROOT = Path(__file__).parents[2]


def run(capsys, *argv):
    """Exit status, standard output, standard error."""
    try:
        status = main(list(argv))
    except SystemExit as ended:
        status = ended.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_version(capsys):
    assert run(capsys, "--version")[:2] == (0, f"kvrail {version('kvrail')}\n")


def test_without_a_command_the_help_is_shown(capsys):
    status, _, error = run(capsys)
    assert status == 2
    assert all(command in error for command in ("up", "router", "prefill", "decode", "chat"))


@pytest.mark.parametrize("role", ROLES)
def test_the_help_of_a_service_shows_each_setting_once_with_its_default(capsys, monkeypatch, role):
    monkeypatch.setenv("COLUMNS", "160")
    status, out, _ = run(capsys, role, "--help")
    assert status == 0
    assert f"\nexample:\n  kvrail {role} " in out
    for name in ROLES[role].model_fields:
        kind = "[no-]" if ROLES[role].model_fields[name].annotation is bool else ""
        flag = rf"\n  --{re.escape(kind)}{flag_name(name)[2:]}\s"  # the help of a long one begins on a line of its own
        assert len(re.findall(flag, out)) == 1
        told = re.split(flag, out)[1].partition("\n  --")[0]
        assert "default" in told or role in ("prefill", "decode")


def test_the_help_of_up_shows_every_flag_that_it_takes(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    _, out, _ = run(capsys, "up", "--help")
    for name, field in up_fields().items():
        kind = "[no-]" if field.annotation is bool else ""
        assert len(re.findall(rf"\n  --{re.escape(kind)}{flag_name(name)[2:]}\s", out)) == 1


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["router", "--prot", "1"], "kvrail router: unknown argument --prot; did you mean --port?"),
        (["router", "--zzz=1"], "kvrail router: unknown argument --zzz=1; kvrail router --help lists all flags"),
        (["router", "--por", "1"], "kvrail router: unknown argument --por; did you mean --port?"),
        (["decode", "--port"], "kvrail decode: argument --port: expected one argument"),
        (["prefill", "--kv-dtype", "int3"], "kvrail prefill: --kv-dtype: 'int3' is not accepted"),
        (["up", "--decode-workers", "0"], "kvrail up: --decode-workers: '0' is not accepted"),
        (["up", "--page-size", "-1"], "kvrail up: --page-size: '-1' is not accepted"),
        (["up", "--model", "./nowhere"], "kvrail up: --model: there is no folder ./nowhere"),
        (["decode", "--codec", "zip"], "kvrail decode: --codec: codec 'zip' is unknown; choose auto or one of raw, "),
        (["decode", "--codec", "lynx"], "kvrail decode: --codec: codec 'lynx' is lossy"),
        (["up", "--kv-memory-gib", "9e9"], "kvrail up: --kv-memory-gib: 9e+09 GiB for pages are more than"),
        (["prefill", "--model", "/"], "kvrail prefill: --model: / has no config.json"),
        (["serve"], "kvrail serve: the following arguments are required: MODEL"),
        (["serve", "./nowhere"], "kvrail serve: --model: there is no folder ./nowhere"),
        (["serve", "/", "--model", "m"], "kvrail serve: unknown argument --model"),
        (["/"], "kvrail serve: --model: / has no config.json"),
        (["servce"], "kvrail: argument COMMAND: invalid choice: 'servce'"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(capsys, argv, line):
    status, out, error = run(capsys, *argv)
    assert (status, out, error.count("\n")) == (2, "", 1)
    assert error.startswith(line)


def test_a_folder_with_a_commands_name_hides_no_command(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert run(capsys, "certs", "certs", "--roles", "router")[0] == 0
    assert run(capsys, "certs", "certs", "--roles", "router", "--renew")[0] == 0
    assert run(capsys, "./certs")[2].startswith("kvrail serve: --model: ./certs has no config.json")


def test_pages_fit_into_what_a_container_may_have(capsys, monkeypatch, tmp_path):
    limit, unlimited = tmp_path / "limit", tmp_path / "unlimited"
    limit.write_text(f"{1 << 30}\n")
    unlimited.write_text("max\n")
    monkeypatch.setattr("kvrail.config.memory.GROUP_LIMITS", (unlimited, tmp_path / "none", limit))
    status, _, error = run(capsys, "decode", "--kv-memory-gib", "1.5")
    assert status == 2 and "1.5 GiB for pages are more than all memory here, 1 GiB; name fewer" in error


@pytest.mark.parametrize("command", [*ROLES, "up"])
@pytest.mark.parametrize("variable", ["", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"])
def test_traces_without_their_extra_are_refused_before_anything_starts(capsys, monkeypatch, command, variable):
    def start(*arguments):
        raise AssertionError("something has started")

    monkeypatch.delitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc", None)  # as with opentelemetry-api alone
    monkeypatch.setattr("kvrail.cli.role.end_with_parent", start)
    monkeypatch.setattr("kvrail.cli.up._supervise", start)
    given, flags = "http://127.0.0.1:4317", []
    if variable:
        monkeypatch.setenv(variable, given)
    else:
        flags = ["--otlp-endpoint", given]
    status, _, error = run(capsys, command, *flags)
    assert status == 2
    assert error == (
        f"kvrail {command}: {variable or '--otlp-endpoint'} is '{given}', and OpenTelemetry is not installed; pip"
        " install 'kvrail[otel]', or name no endpoint\n"
    )


def test_values_survive_the_way_through_a_command_line():
    values = {
        "port": 9,
        "prefix_cache": False,
        "eager": True,
        "kv_memory_gib": 0.5,
        "model": "a b=c",
        "device": "cuda:3",
    }
    arguments = build_parser().parse(["prefill", *flag_arguments(values)])
    given = given_flags(arguments, PrefillSettings.model_fields)
    settings = PrefillSettings.load(given)
    assert {name: getattr(settings, name) for name in values} == values
    router = {
        "decode_workers": ("a:1", "b:2"),
        "prefill_workers": (),
        "api_keys": ("-k", "l"),
        "override_generation_config": {"temperature": 0.5, "top_k": 3, "min_p": None},
    }
    arguments = build_parser().parse(["router", *flag_arguments(router)])
    settings = RouterSettings.load(given_flags(arguments, RouterSettings.model_fields))
    assert {name: getattr(settings, name) for name in router} == router


def test_a_flag_that_is_not_given_leaves_the_default_to_the_settings():
    arguments = build_parser().parse(["decode"])
    assert given_flags(arguments, DecodeSettings.model_fields) == {}


@pytest.mark.parametrize("argv", [["--help"], ["router", "--help"], ["up", "--help"], ["chat", "--help"]])
def test_the_command_line_is_quick_to_start(argv):
    heavy = ("torch", "transformers", "httpx", "grpc", "fastapi", "numpy")
    code = f"""
import sys
from kvrail.cli.main import main
try:
    main({argv!r})
except SystemExit:
    pass
print([name for name in {heavy!r} if name in sys.modules], file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_the_router_never_imports_torch():
    heavy = ("torch", "transformers", "triton", "numpy", "kvrail.engine")
    imports = "import sys, kvrail.cli.role, kvrail.services.router.main"
    code = f"{imports}; print(sorted(set({heavy}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_is_checked_of_a_worker_needs_no_torch():
    code = """
import sys
from kvrail.config.settings import DecodeSettings
from kvrail.cli.checks import check_worker
check_worker(DecodeSettings(codec="lynx-exact"))
print([name for name in ("torch", "numpy", "numba") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_workers_run_without_triton():
    code = "import sys; sys.modules['triton'] = None; import kvrail.services.worker.serving"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize(
    ("given", "role", "wanted"), [(None, "decode", SPIN_COUNT), ("7", "prefill", "7"), (None, "router", None)]
)
def test_teams_of_workers_soon_sleep(monkeypatch, given, role, wanted):
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    if given is not None:
        monkeypatch.setenv("GOMP_SPINCOUNT", given)
    monkeypatch.setattr("kvrail.cli.role.end_with_parent", lambda _: None)
    monkeypatch.setattr("kvrail.runtime.background.end", lambda status: status)  # it would end the tests
    found = []
    service = SimpleNamespace(setup=lambda *_: None, run=lambda _: found.append(os.environ.get("GOMP_SPINCOUNT")) or 0)
    monkeypatch.setattr("kvrail.cli.role.importlib.import_module", lambda _: service)
    workers = ["--prefill-workers=127.0.0.1:1", "--decode-workers=127.0.0.1:2"] if role == "router" else []
    assert main([role, *workers, "--model=models/kvrail-demo"]) == 0
    assert found == [wanted]
