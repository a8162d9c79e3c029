"""How long one turn of the router's event loop takes while fuzz.py sends its bodies: nobody else is served in it.

python -m tests.router.turns COUNT SEED prints the distribution, in milliseconds of the processor's time: what others do
on the machine is not in it, nor what the router's other threads do.
"""

import asyncio
import gc
import json
import sys
import tempfile
import time
from pathlib import Path

from kvrail.text import load_tokenizer
from tests.router.cluster import run_cluster, write_tokenizer

ROOT = Path(__file__).parents[2]
SHARES = (0.5, 0.99, 0.999, 0.9999, 1.0)


async def measure(count: str, seed: str) -> dict[str, object]:
    """Answers by status, and the turns' times."""
    turns: list[float] = []
    run = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        begin = time.thread_time()
        run(handle)
        turns.append(time.thread_time() - begin)

    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        async with run_cluster(load_tokenizer(folder)) as cluster:
            gc.collect()
            gc.freeze()  # as the router does at its start
            command = [sys.executable, "-m", "tests.router.fuzz", cluster.url, count, seed]
            sending = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
            asyncio.Handle._run = timed
            try:
                printed, _ = await sending.communicate()
            finally:
                asyncio.Handle._run = run
    turns.sort()
    times = {
        f"{100 * share:g} %": round(1e3 * turns[min(len(turns) - 1, int(share * len(turns)))], 2) for share in SHARES
    }
    return {"statuses": json.loads(printed)["statuses"], "turns": len(turns), "ms": times}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measure(sys.argv[1], sys.argv[2]))))  # noqa: T201
