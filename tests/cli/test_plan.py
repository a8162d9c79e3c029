"""What `kvrail up` would start."""

import socket
import subprocess
import sys
from contextlib import ExitStack, suppress

import pytest

from kvrail.cli.cluster import gpus
from kvrail.cli.cluster.plan import LOOPBACK, plan_cluster, threads_each
from kvrail.cli.flags import given_flags
from kvrail.cli.main import build_parser
from kvrail.cli.up import program, up_fields, welcome
from kvrail.config.settings import BothSettings, DecodeSettings, PrefillSettings, RouterSettings
from kvrail.errors import ConfigError
from kvrail.rpc.http_side import listen
from kvrail.rpc.server import build_server

SETTINGS = {"router": RouterSettings, "prefill": PrefillSettings, "decode": DecodeSettings, "worker": BothSettings}


@pytest.fixture(autouse=True)
def model(tmp_path, monkeypatch):
    """A model folder of 1 GiB, by name of the file alone."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(1 << 30)
    return str(folder)


def plan(*argv, config=None, gpus=(), model):
    arguments = build_parser().parse(["up", "--port", "0", "--model", model, *argv])
    with ExitStack() as held:
        return plan_cluster(given_flags(arguments, up_fields()), config, list(gpus), held)


def settings_of(process):
    """The settings that the process will read from its command line."""
    role_and_flags = list(process.command[process.command.index("kvrail") + 1 :])
    arguments = build_parser().parse(role_and_flags)
    cls = SETTINGS[role_and_flags[0]]
    return cls.load(given_flags(arguments, cls.model_fields), arguments.config)


def test_the_router_knows_each_worker_and_ports_are_apart(model):
    cluster = plan("--prefill-workers", "2", "--decode-workers", "3", model=model)
    assert [process.name for process in cluster.processes] == [
        "router",
        *("prefill-0", "prefill-1"),
        *("decode-0", "decode-1", "decode-2"),
    ]
    router, *workers = map(settings_of, cluster.processes)
    assert router.prefill_workers == tuple(f"{LOOPBACK}:{worker.port}" for worker in workers[:2])
    assert router.decode_workers == tuple(f"{LOOPBACK}:{worker.port}" for worker in workers[2:])
    ports = [router.port, *(port for worker in workers for port in (worker.port, worker.metrics_port))]
    assert len(set(ports)) == len(ports) == 11
    assert cluster.url == f"http://{LOOPBACK}:{router.port}"
    for process, worker in zip(cluster.processes[1:], workers, strict=True):
        assert process.url == f"http://{LOOPBACK}:{worker.metrics_port}"
        assert worker.host == LOOPBACK


def test_a_lossy_form_of_pages_is_for_workers_that_decode(model, tmp_path):
    for role, workers in (("--decode-workers", ["plain", "int4"]), ("--workers", ["int4"])):
        _, *given = map(settings_of, plan("--kv-cache", "int4", role, "1", model=model).processes)
        assert [worker.kv_cache for worker in given] == workers
    _, *given = map(settings_of, plan("--kv-cache", "lossless", model=model).processes)
    assert [worker.kv_cache for worker in given] == ["lossless", "lossless"]
    file = tmp_path / "cluster.toml"
    file.write_text('kv_cache = "int8"')
    with pytest.raises(ConfigError, match=r"kv_cache in .*: int8 loses bits.*, in table \[decode\]"):
        plan(config=file, model=model)
    file.write_text('[decode]\nkv_cache = "int8"')
    _, *given = map(settings_of, plan(config=file, model=model).processes)
    assert [worker.kv_cache for worker in given] == ["plain", "int8"]


def test_a_port_is_given_once_however_few_there_are(model, monkeypatch):
    monkeypatch.setattr(
        "kvrail.cli.cluster.plan.WORKER_PORTS", [port for port in range(21_000, 21_020) for _ in range(20)]
    )
    _, *workers = map(settings_of, plan("--decode-workers", "3", model=model).processes)
    ports = [port for worker in workers for port in (worker.port, worker.metrics_port)]
    assert len(set(ports)) == 8


def free_run(count):
    """The first of `count` neighbouring ports that nobody listens on, and one more that is free."""
    for first in range(21_100, 32_000, 10):
        with suppress(OSError), ExitStack() as held:
            for port in range(first, first + count + 1):
                held.enter_context(socket.create_server((LOOPBACK, port)))
            return first
    raise AssertionError("no free ports")


def test_metrics_ports_are_fixed_and_follow_each_other(model):
    first = free_run(3)
    argv = ("--port", str(first + 3), "--metrics-port", str(first), "--decode-workers", "2")
    cluster = plan(*argv, model=model)
    assert [process.url for process in cluster.processes[1:]] == [f"http://{LOOPBACK}:{first + i}" for i in range(3)]
    assert all(f"http://{LOOPBACK}:{first + i}/metrics" in welcome(cluster) for i in range(3))
    with (
        socket.create_server((LOOPBACK, first + 2)),
        pytest.raises(ConfigError, match=f"--metrics-port: cannot listen on {LOOPBACK}:{first + 2}: "),
    ):
        plan(*argv, model=model)


def test_a_codec_that_is_unknown_is_found_before_anything_starts(tmp_path, model):
    path = tmp_path / "cluster.toml"
    path.write_text('[decode]\ncodec = "splitzip-chanel"\n')
    with pytest.raises(ConfigError, match="codec 'splitzip-chanel' is unknown; did you mean splitzip-channel"):
        plan(config=path, model=model)
    with pytest.raises(ConfigError, match="choose auto or one of raw, splitzip"):
        plan("--codec", "zip", model=model)
    with pytest.raises(ConfigError, match=r"--codebook /nowhere\.json: No such file"):
        plan("--codebook", "/nowhere.json", model=model)


def test_without_prefill_workers_the_router_has_none(model):
    cluster = plan("--prefill-workers", "0", model=model)
    assert settings_of(cluster.processes[0]).prefill_workers == ()


def test_workers_of_both_roles_stand_alone_or_beside_others(model):
    cluster = plan("--workers", "2", "--max-running", "7", "--codec", "raw", model=model)
    assert [process.name for process in cluster.processes] == ["router", "worker-0", "worker-1"]
    router, *workers = map(settings_of, cluster.processes)
    assert router.workers == tuple(f"{LOOPBACK}:{worker.port}" for worker in workers)
    assert router.prefill_workers == router.decode_workers == ()
    assert all((worker.max_running, worker.codec) == (7, "raw") for worker in workers)
    mixed = plan("--workers", "1", "--prefill-workers", "1", model=model)
    assert [process.name for process in mixed.processes] == ["router", "prefill-0", "worker-0"]
    assert settings_of(mixed.processes[0]).decode_workers == ()


def test_flags_reach_every_service_that_has_them(model):
    argv = ("--page-size", "16", "--no-prefix-cache", "--local-prefill-tokens", "7", "--log-level", "debug")
    cluster = plan(*argv, "--max-body-bytes", "99", model=model)
    router, prefill, decode = map(settings_of, cluster.processes)
    assert {each.log_level for each in (router, prefill, decode)} == {"debug"}
    assert {each.model for each in (router, prefill, decode)} == {model}
    assert {(each.page_size, each.prefix_cache) for each in (prefill, decode)} == {(16, False)}
    assert (router.max_body_bytes, decode.local_prefill_tokens) == (99, 7)


def test_the_file_reaches_the_services_and_up_itself(tmp_path, model):
    path = tmp_path / "cluster.toml"
    path.write_text(
        "page_size = 8\n[up]\ndecode_workers = 2\n[router]\nmax_body_bytes = 5\n[decode]\nmax_running = 3\n"
    )
    cluster = plan(config=path, model=model)
    router, prefill, *decode = map(settings_of, cluster.processes)
    assert (router.max_body_bytes, prefill.page_size, prefill.max_running) == (5, 8, 0)
    assert [each.max_running for each in decode] == [3, 3]


def test_what_is_planned_wins_over_the_file(tmp_path, model):
    path = tmp_path / "cluster.toml"
    path.write_text(f'model = "{model}"\nhost = "0.0.0.0"\n[router]\nport = 1\n[decode]\nport = 2\nmetrics_port = 3\n')
    router, _, decode = map(settings_of, plan("--host", LOOPBACK, config=path, model=model).processes)
    assert {router.host, decode.host} == {LOOPBACK}
    assert router.decode_workers == (f"{LOOPBACK}:{decode.port}",)
    assert not {1, 2, 3} & {router.port, decode.port, decode.metrics_port}


def test_a_mistake_in_a_services_table_is_found_before_anything_starts(tmp_path, model):
    path = tmp_path / "cluster.toml"
    path.write_text("[decode]\nmax_running = -1\n")
    with pytest.raises(ConfigError, match=r"max_running in .*cluster\.toml: -1"):
        plan(config=path, model=model)


def test_api_keys_stay_out_of_the_list_of_processes(model):
    cluster = plan("--api-keys", "secret", model=model)
    assert not any("secret" in word for process in cluster.processes for word in process.command)
    assert cluster.processes[0].environment == {"KVRAIL_ROUTER_API_KEYS": "secret"}
    assert "$KVRAIL_API_KEY" in welcome(cluster)
    assert f"{cluster.url}/docs" in welcome(cluster)
    assert "secret" not in welcome(cluster)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_taken_port_is_refused(model, host):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(ConfigError, match=rf"{host}:{port}.*in use.*--port"):
            plan("--host", host, "--port", port, model=model)


async def test_another_cluster_takes_no_port_of_one_that_still_starts(model, monkeypatch):
    """Two clusters that start at once draw from the same ports; the workers of each can listen on theirs."""
    monkeypatch.setattr("kvrail.cli.cluster.plan.WORKER_PORTS", range(20_100, 20_300))
    given = given_flags(build_parser().parse(["up", "--port", "0", "--model", model]), up_fields())
    with ExitStack() as held:
        planned = [plan_cluster(given, None, [], held) for _ in range(20)]
        workers = [settings_of(process) for cluster in planned for process in cluster.processes[1:]]
        ports = [port for worker in workers for port in (worker.port, worker.metrics_port)]
        assert len(set(ports)) == len(ports) == 80
        rpc, listener = await build_server(), listen(LOOPBACK, workers[0].metrics_port)
        assert rpc.bind(LOOPBACK, workers[0].port) == workers[0].port
        listener.close()
        await rpc.stop()


def test_an_address_of_another_machine_is_refused(model):
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1"):
        plan("--host", "192.0.2.1", model=model)


def test_a_wildcard_address_is_shown_as_one_that_can_be_called(model):
    assert plan("--host", "0.0.0.0", model=model).url.startswith("http://127.0.0.1:")


@pytest.mark.parametrize(("host", "shown"), [("::1", "[::1]"), ("::", "[::1]"), ("fd00::2", "[fd00::2]")])
def test_an_address_of_ipv6_stands_in_brackets(model, monkeypatch, host, shown):
    monkeypatch.setattr("kvrail.cli.cluster.plan._bind", lambda held, host, port, *_, **__: port)  # IPv6 or not
    cluster = plan("--host", host, "--port", "8123", model=model)
    assert cluster.url == f"http://{shown}:8123"
    assert f"{cluster.url}/v1" in welcome(cluster)


def test_a_name_that_no_host_can_have_is_refused(model):
    with pytest.raises(ConfigError, match=r"--port: cannot listen on a{64}:\d+: .*label"):
        plan("--host", "a" * 64, model=model)
    with pytest.raises(ConfigError, match=r"cannot listen on a{64}:0: .*label"):
        listen("a" * 64, 0)


def test_gpus_are_taken_in_turn(model, monkeypatch):
    monkeypatch.setattr("kvrail.cli.cluster.plan.shared_kv_memory_gib", lambda *_: 1.5)
    cluster = plan("--prefill-workers", "2", "--decode-workers", "1", gpus="01", model=model)
    workers = [settings_of(process) for process in cluster.processes[1:]]
    assert [worker.device for worker in workers] == ["cuda:0", "cuda:1", "cuda:0"]
    assert [worker.kv_memory_gib for worker in workers] == [1.5, 0.0, 1.5]  # only those that share one are told


def test_memory_that_was_asked_for_is_kept_on_a_shared_gpu(model):
    cluster = plan("--kv-memory-gib", "0.7", gpus="0", model=model)
    assert {settings_of(process).kv_memory_gib for process in cluster.processes[1:]} == {0.7}


def test_the_device_follows_the_machine_unless_named(model):
    assert plan(model=model).device == "cpu"
    assert plan("--kv-memory-gib", "1", gpus="0", model=model).device == "cuda"
    assert plan("--device", "cpu", gpus="0", model=model).device == "cpu"
    with pytest.raises(ConfigError, match="--device"):
        plan("--device", "cuda", model=model)


def test_threads_are_shared_but_never_none():
    assert [threads_each(workers, 8) for workers in (1, 2, 3, 16)] == [8, 4, 2, 1]


def test_threads_are_left_alone_where_the_environment_says_them(model, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert "OMP_NUM_THREADS" in plan(model=model).processes[1].environment
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert "OMP_NUM_THREADS" not in plan(model=model).processes[1].environment


def fake_smi(tmp_path, monkeypatch, script):
    """A program named nvidia-smi in front of the path."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


def test_gpus_are_those_of_the_driver_or_of_the_mask(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fake_smi(tmp_path, monkeypatch, "printf '0\\n1\\n'")
    assert gpus.visible_gpus() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-abc")
    assert gpus.visible_gpus() == ["3", "GPU-abc"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpus.visible_gpus() == []


def test_a_machine_without_a_working_driver_has_no_gpus(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fake_smi(tmp_path, monkeypatch, "echo 'NVIDIA-SMI has failed'; exit 9")
    assert gpus.visible_gpus() == []
    monkeypatch.setenv("PATH", "/nowhere")
    assert gpus.visible_gpus() == []


def test_workers_on_one_gpu_share_its_memory(tmp_path, monkeypatch, model):
    fake_smi(tmp_path, monkeypatch, "echo 20480")  # MiB
    # 85 % of 20 GiB for two, less 1 GiB of weights and 1.5 GiB of reserve each
    assert gpus.shared_kv_memory_gib("0", 2, model) == pytest.approx(6.0)
    with pytest.raises(ConfigError, match="too little"):
        gpus.shared_kv_memory_gib("0", 8, model)


@pytest.mark.parametrize("place", ["on the path", "in the folder", "elsewhere", "not installed"])
def test_what_up_proposes_starts_as_printed(place, tmp_path, monkeypatch):
    """Whether or not its virtual environment is active."""
    folder = tmp_path / "my work" / ".venv" / "bin"
    folder.mkdir(parents=True)
    if place != "not installed":
        (folder / "kvrail").write_text("#!/bin/sh\necho started\n")
        (folder / "kvrail").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.chdir(tmp_path if place == "elsewhere" else tmp_path / "my work")
    monkeypatch.setenv("PATH", f"{folder if place == 'on the path' else ''}:/usr/bin:/bin")
    if place == "not installed":
        assert program().endswith("python' -m kvrail")
        return
    assert program() == ("kvrail" if place == "on the path" else program())
    assert place != "in the folder" or program() == ".venv/bin/kvrail"
    said = subprocess.run(program(), shell=True, capture_output=True, text=True, check=True).stdout
    assert said == "started\n"
