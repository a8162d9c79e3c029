"""What a worker meets in the image for GPUs, without Docker: no C++ compiler, code that is read-only, HOME elsewhere.

The variables are those of deploy/docker/Dockerfile, with other folders for /cache and /hub.
"""

import asyncio
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from kvrail.config.settings import DEMO_MODEL
from tests.e2e.test_worker_end import free_port

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
COMPILERS = re.compile(r"(.*-)?(cc|gcc|c89|c99|clang|tcc)(-[\d.]+)?|c89-gcc|c99-gcc")
CXX = re.compile(r"(.*-)?(c\+\+|g\+\+|clang\+\+)(-[\d.]+)?")
PROMPT = "The router chooses a decode worker and a prefill worker for each prompt. " * 12
START_S = 400.0
log = logging.getLogger(__name__)


def image_variables(cache, hub):
    """The ENV instructions of the Dockerfile."""
    text = (ROOT / "deploy" / "docker" / "Dockerfile").read_text().replace("\\\n", " ")
    words = [word for line in text.splitlines() if line.startswith("ENV ") for word in shlex.split(line)[1:]]
    found = dict(word.split("=", 1) for word in words)
    assert found["TRITON_CACHE_DIR"] == "/cache/triton"
    places = {"/cache": str(cache), "/hub": str(hub)}
    return {name: re.sub(r"^/(cache|hub)", lambda m: places[m[0]], value) for name, value in found.items()}


def programs(folder, without):
    """A folder with all programs of PATH but those."""
    folder.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        for program in Path(place).iterdir() if Path(place).is_dir() else ():
            hidden = any(pattern.fullmatch(program.name) for pattern in without)
            if not hidden and not (folder / program.name).is_symlink():
                (folder / program.name).symlink_to(program)
    return folder


def mounted(*arguments):
    return subprocess.run(["mount", *map(str, arguments)], capture_output=True).returncode == 0


@pytest.fixture
def noexec(tmp_path):
    """A folder from which nothing can be executed or loaded."""
    folder = tmp_path / "noexec"
    folder.mkdir()
    if mounted("-t", "tmpfs", "-o", "noexec,size=256m", "none", folder):
        yield folder
        subprocess.run(["umount", folder], check=True)
    elif os.statvfs("/dev/shm").f_flag & os.ST_NOEXEC:
        folder = Path("/dev/shm") / f"kvrail-{os.getpid()}"
        folder.mkdir()
        yield folder
        shutil.rmtree(folder)
    else:
        pytest.skip("needs a file system mounted noexec: run this as root, or where /dev/shm is one")


@pytest.fixture
def code(tmp_path):
    """The package where nobody can write: a read-only mount where that is allowed, else folders without the right."""
    folder = tmp_path / "code"
    shutil.copytree(ROOT / "kvrail", folder / "kvrail", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "models").symlink_to(Path(DEMO_MODEL).parent)
    bound = mounted("--bind", folder, folder) and mounted("-o", "remount,bind,ro", folder)
    if not bound:
        subprocess.run(["chmod", "-R", "a-w", folder], check=True)
    yield folder
    if bound:
        subprocess.run(["umount", folder], check=True)
    else:
        subprocess.run(["chmod", "-R", "u+w", folder], check=True)


def environment(code, path, **variables):
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES") if name in os.environ}
    paths = [str(code), *filter(None, [os.environ.get("PYTHONPATH")])]
    return kept | {"PATH": str(path), "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"} | variables


def refused(code, env):
    """The line with which a prefill worker refuses to start."""
    command = [sys.executable, "-P", "-m", "kvrail", "prefill", "--device", "cuda", "--port", "0"]
    done = subprocess.run(command, cwd="/", env=env, capture_output=True, text=True, timeout=START_S)
    said = done.stdout + done.stderr
    assert done.returncode == 1, said
    assert "Traceback" not in said
    (line,) = [line for line in said.splitlines() if "ERROR" in line]
    log.info("%s", line)
    return line


def test_without_a_compiler_a_worker_says_so_and_ends(tmp_path, code, noexec):
    path = programs(tmp_path / "bin", [COMPILERS, CXX])
    line = refused(code, environment(code, path, HOME=str(noexec), TRITON_CACHE_DIR=str(tmp_path / "cache")))
    assert "C compiler" in line
    assert "install gcc and libc6-dev" in line


def test_with_its_cache_on_a_noexec_home_a_worker_says_so_and_ends(tmp_path, code, noexec):
    line = refused(code, environment(code, programs(tmp_path / "bin", [CXX]), HOME=str(noexec)))
    assert "mounted noexec" in line
    assert "TRITON_CACHE_DIR" in line


@asynccontextmanager
async def running(tmp_path, role, env, *flags):
    """A process of kvrail, which is asked to stop in the end."""
    errors = tmp_path / f"{role}.log"
    with errors.open("a") as told:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "kvrail", role, *flags, cwd="/", env=env, stdout=told, stderr=told
        )
    try:
        yield process
    except BaseException:
        log.error("%s", errors.read_text()[-4000:])
        raise
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.wait(), 60)


async def healthy(url, *processes):
    deadline = time.monotonic() + START_S
    async with httpx.AsyncClient(trust_env=False) as http:
        while time.monotonic() < deadline:
            assert all(process.returncode is None for process in processes), "a process has ended"
            try:
                answer = await http.get(f"{url}/health")
            except httpx.TransportError:
                pass
            else:
                if answer.status_code == 200 and "degraded" not in answer.text:
                    return
            await asyncio.sleep(0.2)
    raise AssertionError(f"{url} is not healthy after {START_S:g} s")


async def test_with_what_the_image_provides_prefill_and_decode_serve(tmp_path, code, noexec):
    for name in ("cache", "hub"):
        (tmp_path / name).mkdir()
    variables = image_variables(tmp_path / "cache", tmp_path / "hub") | {"TMPDIR": str(noexec)}
    env = environment(code, programs(tmp_path / "bin", [CXX]), **variables)
    ports = {name: free_port() for name in ("router", "prefill", "decode", "prefill-metrics", "decode-metrics")}

    def worker(role):
        flags = ("--device", "cuda", "--kv-memory-gib", "2", "--port", ports[role])
        return running(tmp_path, role, env, *map(str, (*flags, "--metrics-port", ports[f"{role}-metrics"])))

    def kernels():
        return {(each, each.stat().st_mtime_ns) for each in (tmp_path / "cache" / "triton").rglob("*.cubin")}

    addresses = (
        "--prefill-workers",
        f"127.0.0.1:{ports['prefill']}",
        "--decode-workers",
        f"127.0.0.1:{ports['decode']}",
    )
    began = time.monotonic()
    async with worker("prefill") as prefill, worker("decode") as decode:
        await healthy(f"http://127.0.0.1:{ports['prefill-metrics']}", prefill)
        await healthy(f"http://127.0.0.1:{ports['decode-metrics']}", decode)
        log.info("both workers are healthy after %.1f s; nothing was compiled before", time.monotonic() - began)
        url = f"http://127.0.0.1:{ports['router']}"
        async with running(tmp_path, "router", env, "--port", str(ports["router"]), *addresses) as router:
            await healthy(url, router)
            body = {"model": "kvrail-demo", "prompt": PROMPT, "max_tokens": 16, "temperature": 0}
            async with httpx.AsyncClient(trust_env=False, timeout=120) as http:
                answer = await http.post(f"{url}/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            usage = answer.json()["usage"]
            log.info("%s", usage)
            assert usage["completion_tokens"] > 0
            assert usage["kvrail"]["prefill_worker"] == f"127.0.0.1:{ports['prefill']}"
            assert usage["kvrail"]["kv_bytes"] > 0
    compiled = kernels()
    assert compiled
    began = time.monotonic()
    async with worker("prefill") as prefill:
        await healthy(f"http://127.0.0.1:{ports['prefill-metrics']}", prefill)
        log.info("the second start of a worker took %.1f s", time.monotonic() - began)
    assert compiled <= kernels()
