"""A router in a process of its own, before a decode worker that a test scripts."""

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from kvrail.rpc.server import build_server
from kvrail.text import Tokenizer
from tests.router.cluster import FakeDecode, Script, until

RUN = """
import sys
from kvrail.config.settings import RouterSettings
from kvrail.services.router.fleet import workers
from kvrail.services.router.main import run
workers.STATUS_INTERVAL_S = 0.05
sys.exit(run(RouterSettings(model=sys.argv[1], decode_workers=(sys.argv[2],), prefill_workers=(), port=0,
                            grace_period_s=20)))
"""


@dataclass(frozen=True, slots=True)
class Running:
    """The process and a client of it."""

    process: asyncio.subprocess.Process
    http: httpx.AsyncClient

    async def status(self) -> str:
        """What /health says."""
        return (await self.http.get("/health")).json()["status"]


@asynccontextmanager
async def run_router(folder: Path, tokenizer: Tokenizer, script: Script) -> AsyncIterator[Running]:
    """Start both; leaving the block ends what still runs."""
    rpc, worker = await build_server(), FakeDecode(tokenizer)
    worker.script = script
    rpc.add_decode(worker)
    target = f"127.0.0.1:{rpc.bind('127.0.0.1', 0)}"
    await rpc.start()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", RUN, str(folder), target, stderr=asyncio.subprocess.PIPE
    )
    try:
        url = ""
        while not url:
            line = (await process.stderr.readline()).decode()
            assert line, "the router ended early"
            url = "".join(re.findall(r"http://[\d.:]+", line))
        async with httpx.AsyncClient(base_url=url, timeout=20) as http:
            running = Running(process, http)

            async def ok() -> bool:
                return await running.status() == "ok"

            await until(ok)
            yield running
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
        await rpc.stop()
