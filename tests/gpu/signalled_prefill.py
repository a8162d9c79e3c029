"""A prefill worker that signals itself in the middle of a transfer: `python -m tests.gpu.signalled_prefill FILE ...`.

FILE says, once it is there, which signal and after how many frames of a transfer; then it is removed.
"""

import os
import sys
from pathlib import Path

from kvrail.cli.main import main
from kvrail.transfer.sending import PageSender

ORDER = Path(sys.argv[1])
leave = PageSender._leave


def obey(frames):
    """Carry out the order, where there is one that is due after so many frames."""
    if not ORDER.exists():
        return
    signal, due = map(int, ORDER.read_text().split())
    if frames >= due:
        ORDER.unlink()
        os.kill(os.getpid(), signal)


async def signalled(sender, stage):
    obey(sender._next_sequence)
    await leave(sender, stage)


if __name__ == "__main__":
    PageSender._leave = signalled
    sys.exit(main(["prefill", *sys.argv[2:]]))
