"""Checks the grammars that clients send in a process of its own, before anything is generated.

llguidance cannot be stopped: a regular expression of 3 kB can keep it busy for hours, and a chain of 2,000 rules
overflows its stack, which ends the process. So the check runs in a process that can be lost. The kernel ends that
process once a check has taken CHECK_S; the next check starts another.
"""

import contextlib
import json
import signal
import subprocess
import sys
from collections import OrderedDict

from kvrail.errors import InvalidRequestError, KvrailError
from kvrail.grammar.compiling import digest, ends_of, keep
from kvrail.grammar.following import CHECK_S, read_message, write_message
from kvrail.runtime.turns import Turns
from kvrail.text import Tokenizer

MAX_CHECKED = 1024
"""Verdicts that are kept, good and bad."""
TOO_SLOW = (
    f"takes more than {CHECK_S:g} s of the processor to compile and to follow for some tokens; send a simpler one, "
    "with fewer properties, alternatives and repetitions"
)
TOO_DEEP = "ends the process that compiles it: its rules or references are nested too deeply; send a flatter one"
_COMMAND = "from kvrail.grammar.following import main; main()"
_VERDICTS = {signal.SIGPROF: TOO_SLOW, signal.SIGSEGV: TOO_DEEP, signal.SIGBUS: TOO_DEEP, signal.SIGABRT: TOO_DEEP}


class Checker:
    """Checks which texts are grammars that can be followed at a bearable cost. Belongs to one event loop."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        self._turns = Turns()
        self._process: subprocess.Popen[bytes] | None = None

    async def check(self, text: str, client: str) -> str:
        """`text`, all of it in Lark; InvalidRequestError where it cannot be compiled and followed.

        client: the name of the client, for turns. Only a text's digest and the fault found in it are kept.
        """
        verdict, lark = self._verdicts.get(digest(text)), text
        if verdict is None:
            verdict, lark = await self._turns.run(client, lambda: self._judged(text))
        if verdict:
            raise InvalidRequestError(verdict)
        return lark

    async def close(self) -> None:
        """End the process. Checks that still run have no caller any more."""
        if self._process is not None:
            self._process.kill()
            self._ended()  # here: at the interpreter's end no thread can be had

    def _judged(self, text: str) -> tuple[str, str]:
        """The fault of `text`, empty: none, and all of it in Lark. Runs in a thread, one at a time."""
        key = digest(text)
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict, lark = self._ask(text)
            if lark:
                return self._judged(lark)
            keep(self._verdicts, key, verdict, MAX_CHECKED)
        return verdict, text

    def _ask(self, text: str) -> tuple[str, str]:
        """The fault of `text`, empty: none. Where it is not all Lark: what it is in Lark, to be asked of next."""
        try:
            process = self._process or self._start()
            assert process.stdin is not None and process.stdout is not None
            write_message(process.stdin, text)
            return read_message(process.stdout), read_message(process.stdout)
        except (EOFError, BrokenPipeError):
            status = self._ended()
        if -status not in _VERDICTS:
            raise KvrailError(f"the process that checks grammars ended with status {status}; retry")
        return _VERDICTS[signal.Signals(-status)], ""

    def _start(self) -> "subprocess.Popen[bytes]":
        ends, size = ends_of(self._tokenizer), self._tokenizer.vocab_size
        self._process = process = subprocess.Popen(
            [sys.executable, "-P", "-c", _COMMAND], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdin is not None
        settings = {"tokenizer": self._tokenizer.to_json(size), "n_vocab": size, "eos_token": ends}
        write_message(process.stdin, json.dumps(settings))
        return process

    def _ended(self) -> int:
        """Wait for the process's end; returns its status."""
        process, self._process = self._process, None
        if process is None:
            return 0
        with contextlib.suppress(BrokenPipeError), process:  # closes the pipes
            process.wait()
        return process.wait()
