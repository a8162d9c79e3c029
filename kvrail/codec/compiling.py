"""Kernels compiled ahead of their first use, and codecs measured, in a process of its own that fills caches on disk.

    CompilerProcess                              main
    order, a line of JSON ─────────── stdin ───▶ uses each codec once, then measures it
    ◀──────────────────────────────── stdout ─── a line of JSON for each codec that is done

Triton's cache and numba's are found again by every process of the same user, so that who uses a codec afterwards loads
what was compiled. On CUDA the process has a context of its own on the same device, some hundred MiB, while it lives.
It ends when all is done, when its input ends, or within a second of its parent's death; while it still imports
torch, when that is done.
"""

import json
import logging
import os
import select
import subprocess
import sys
import threading
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from kvrail.codec import registry
from kvrail.codec.base import Block, BlockSpec, Codec, PagedBlock
from kvrail.codec.core.digest import digest_of
from kvrail.codec.cost import CodecCost, measure
from kvrail.codec.splitzip.one_stage.codebook import Codebook

logger = logging.getLogger("kvrail.codecs")

LIFELINE_S = 1.0
"""How often the process looks whether its parent lives, besides waiting for its input to end."""
NICENESS = 10
"""A tenth of what others get where they want all cores. With 19 a busy host leaves it less than it needs to start."""
_COMMAND = "import os; os.nice({}); from kvrail.codec.compiling import main; main()"  # before it imports anything else


@dataclass(frozen=True, slots=True)
class Order:
    """What to compile for: pages of `spec` on `device`, codecs `names` in that order; codebook: a file's path or "".

    Costs are measured on a block of `spec`.
    """

    spec: BlockSpec
    device: str
    codebook: str
    names: tuple[str, ...]


def sample_pages(spec: BlockSpec, device: torch.device) -> PagedBlock:
    """Pages of normally distributed KV, the same each time."""
    generator = torch.Generator().manual_seed(0)
    lead, dtype = (spec.num_layers, spec.num_pages, spec.page_size, spec.num_kv_heads), getattr(torch, spec.dtype)
    keys, values = (
        torch.randn((*lead, dim), generator=generator).to(dtype).to(device) for dim in (spec.key_dim, spec.value_dim)
    )
    scales = [torch.ones(lead, device=device) for _ in range(2)] if spec.scaled else [None, None]
    return PagedBlock.whole(Block(keys, values, *scales))


def use_once(codec: Codec, pages: PagedBlock) -> None:
    """Do with `pages` all that transfers do with a codec, so that its kernels are compiled, or loaded from the cache.

    The pages may hold something else afterwards, where the codec is lossy.
    """
    on_cuda = pages.device.type == "cuda"
    stream = torch.cuda.Stream(pages.device) if on_cuda else None  # type: ignore[no-untyped-call]
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream(pages.device))
    with torch.cuda.stream(stream):
        payloads = codec.encode(pages).stages()
        for stage in range(codec.num_stages):
            codec.decode(stage, payloads[: stage + 1], pages)
        if codec.device_payloads and on_cuda:
            payloads = codec.encode(pages, on_device=True).stages()
            for payload in payloads:
                digest_of(payload)
            codec.decode(codec.num_stages - 1, payloads, pages)
    if stream is not None:
        stream.synchronize()


class CompilerProcess:
    """One such process. Where it cannot be started or dies, codecs that are not done count as failed; nothing raises.

    urgent: at normal priority, since requests ask for these codecs. Any thread may use it.
    """

    def __init__(self, order: Order, *, urgent: bool = False) -> None:
        self._outcomes: dict[str, Future[CodecCost | None]] = {name: Future() for name in order.names}
        self._process: subprocess.Popen[str] | None = None
        try:
            self._process = _start(0 if urgent else NICENESS)
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({"parent": os.getpid(), **asdict(order)}) + "\n")
            self._process.stdin.flush()  # it stays open: its end ends the process
        except OSError as error:
            logger.warning("kernels are compiled on first use, since no process for it can be started: %s", error)
        threading.Thread(target=self._listen, name="compiling", daemon=True).start()

    def outcome(self, name: str) -> "Future[CodecCost | None]":
        """The cost of `name`, one of the order's, done once it was compiled and measured; None where that failed."""
        return self._outcomes[name]

    def knows(self, name: str) -> bool:
        """Whether `name` is one of the order's."""
        return name in self._outcomes

    def close(self) -> None:
        """End the process; what is not done counts as failed. A second call does nothing."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @property
    def pid(self) -> int:
        """The process's id; 0 where it could not be started."""
        return self._process.pid if self._process is not None else 0

    def _listen(self) -> None:
        """Settle outcomes as they are reported, then those that never were."""
        try:
            if self._process is not None and self._process.stdout is not None:
                for line in self._process.stdout:
                    self._take(line)
                self._process.wait()
        finally:
            for outcome in self._outcomes.values():
                if not outcome.done():
                    outcome.set_result(None)

    def _take(self, line: str) -> None:
        """One answer; whatever else a library printed is passed over."""
        try:
            report = json.loads(line)
            outcome, error = self._outcomes[report["codec"]], report["error"]
            cost = None if error else CodecCost(report["encode_s"], report["decode_s"], tuple(report["stages"]))
        except (ValueError, KeyError, TypeError):
            logger.debug("the compiling process printed %r", line)
            return
        if error:
            logger.warning("kernels of codec %s are compiled on first use: %s", report["codec"], error)
        if not outcome.done():
            outcome.set_result(cost)


def _start(niceness: int) -> "subprocess.Popen[str]":
    """The process, in which this package is the same as here, with one thread for each library."""
    root = str(Path(__file__).parents[2])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _COMMAND.format(niceness)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    )


def _watch(parent: int) -> None:
    """End this process at once when its input ends, or with its parent. Others may hold the pipe open."""
    while os.getppid() == parent:
        readable, _, _ = select.select([0], [], [], LIFELINE_S)
        if readable and not os.read(0, 4096):
            break
    os._exit(1)


def main() -> None:
    """Do one order, then end at once: an orderly end takes torch a second."""
    code = 0
    try:
        _do_order()
    except Exception:
        logger.exception("the process that compiles kernels has failed")
        code = 1
    finally:
        os._exit(code)


def _do_order() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    order = json.loads(sys.stdin.readline())
    threading.Thread(target=_watch, args=(order["parent"],), daemon=True).start()
    torch.set_num_threads(1)
    pages = sample_pages(BlockSpec(**order["spec"]), torch.device(order["device"]))
    codebook = Codebook.load(order["codebook"]) if order["codebook"] else None
    for name in order["names"]:
        answer: dict[str, object] = {"codec": name, "error": ""}
        try:
            codec = registry.get(name, codebook)
            use_once(codec, pages)
            answer |= asdict(measure(codec, pages))
        except Exception as failure:  # noqa: BLE001  # whatever it is, the others may do
            answer["error"] = f"{type(failure).__name__}: {failure}"
        print(json.dumps(answer), file=answers, flush=True)
