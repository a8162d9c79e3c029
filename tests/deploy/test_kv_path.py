"""Which way KV takes under the GPU overlays and in the chart, by the settings that workers get there."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from kvrail.config.settings import DecodeSettings, PrefillSettings
from kvrail.worker.transports import in_clear, taken
from tests.deploy.test_chart import CHART, of_kind, reaches, rendered, settings_of

ROOT = Path(__file__).parents[2]
ROLES = {"prefill": PrefillSettings, "decode": DecodeSettings}
OVERLAYS = {"sockets": ("gpu",), "ucx": ("gpu", "gpu-ucx")}
TAKEN = {"sockets": ["tcp"], "ucx": ["ucx", "tcp"]}
IN_CLEAR = {"sockets": [], "ucx": ["ucx"]}


def composed(*overlays):
    """compose.yaml under overlays, as Compose merges them."""
    asked = ["docker", "compose", "version"]
    if shutil.which("docker") is None or subprocess.run(asked, capture_output=True).returncode:
        pytest.skip("needs docker's compose plugin, though no engine")
    files = ["compose.yaml", *(f"deploy/docker/compose.{name}.yaml" for name in overlays)]
    flags = [flag for file in files for flag in ("--file", file)]
    command = ["docker", "compose", *flags, "config", "--format", "json"]
    return json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize("path", OVERLAYS)
def test_the_overlays_for_gpus_say_how_kv_crosses(path, monkeypatch):
    told = composed(*OVERLAYS[path])
    for role, cls in ROLES.items():
        service = told["services"][role]
        with monkeypatch.context() as patch:
            for name, value in service["environment"].items():
                patch.setenv(name, value)
            settings = cls.load()
        assert settings.tls_cert and taken(settings) == TAKEN[path]
        assert in_clear(settings, taken(settings)) == IN_CLEAR[path]
        assert settings.ucx_host == ("" if path == "sockets" else f"{role}-pages")
        assert settings.device == ("cuda" if path == "sockets" else {"prefill": "cuda:0", "decode": "cuda:1"}[role])
        (devices,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert devices.get("count") == (None if path == "sockets" else -1)  # -1: all, as cuda_ipc needs
        shared = None if path == "sockets" else "host"
        assert service.get("ipc") == service.get("pid") == shared
        assert service["ulimits"] == {"memlock": -1} and service["read_only"] and service["cap_drop"] == ["ALL"]


def test_ucx_listens_where_nothing_but_workers_is():
    told = composed(*OVERLAYS["ucx"])
    there = {name for name, service in told["services"].items() if "pages" in (service.get("networks") or {})}
    assert there == set(ROLES) and told["networks"]["pages"]["internal"]
    for role in ROLES:
        assert told["services"][role]["networks"]["pages"]["aliases"] == [f"{role}-pages"]


CASES = {"gpu": ("sockets", False), "nvlink": ("ucx", True), "everything": ("ucx", True), "minimal": ("sockets", False)}


@pytest.mark.parametrize("case", CASES)
def test_the_chart_says_how_kv_crosses(case):
    path, encrypted_calls = CASES[case]
    objects, _ = rendered(yaml.safe_load((CHART / "ci" / f"{case}-values.yaml").read_text()))
    pods = {role: of_kind(objects, "Deployment")[role]["spec"]["template"] for role in ROLES}
    for role in ROLES:
        settings, given, _ = settings_of(objects, role)
        assert taken(settings) == TAKEN[path]
        assert in_clear(settings, taken(settings)) == (IN_CLEAR[path] if encrypted_calls else [])
        shares = case == "nvlink"
        assert pods[role]["spec"].get("hostIPC", False) == pods[role]["spec"].get("hostPID", False) == shares
        assert given.get("NVIDIA_VISIBLE_DEVICES") == ("all" if shares else None)
        other = pods["decode" if role == "prefill" else "prefill"]["metadata"]["labels"]
        assert reaches(objects, other, role, 40000) == (path == "ucx")
        assert not reaches(objects, {"app": "stranger"}, role, 40000)


def test_pods_share_nothing_with_the_host_unless_asked():
    objects, _ = rendered({})
    for deployment in of_kind(objects, "Deployment").values():
        assert not {"hostIPC", "hostPID", "hostNetwork"} & deployment["spec"]["template"]["spec"].keys()
