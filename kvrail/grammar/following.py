"""The process that checks grammars (kvrail.grammar.checking): it compiles each text and follows it for some tokens.

A message on its standard input or output is a length of four bytes, and that many bytes of UTF-8. The first one is the
tokenizer; each later one is a text. Two answer it: the fault in it, if any, and its form in Lark where it is not all
Lark, which is then not checked yet.
"""

import contextlib
import json
import random
import resource
import signal
import sys
import threading
from collections.abc import Sequence
from typing import IO

from llguidance import LLTokenizer, grammar_from

from kvrail.errors import InvalidRequestError
from kvrail.grammar.compiling import compile_text, reason_of
from kvrail.grammar.texts import EITHER, from_lark

CHECK_S = 0.5
"""The most CPU time for compiling a text and finding the tokens of a probe. Objects of 400 optional properties take
0.02 s, 6,000 required ones 0.26 s."""
PROBED_TOKENS = 32
STACK_BYTES = 1 << 20
"""Half of the smallest that a worker's threads have, so that what is compiled here is compiled there. A chain of 90
references fits."""


def write_message(out: IO[bytes], text: str) -> None:
    """Send one message."""
    data = text.encode()
    out.write(len(data).to_bytes(4, "big") + data)
    out.flush()


def read_message(source: IO[bytes]) -> str:
    """Wait for one message. Raises EOFError where the input has ended."""
    head = source.read(4)
    data = source.read(int.from_bytes(head, "big"))
    if len(head) < 4 or len(data) < int.from_bytes(head, "big"):
        raise EOFError
    return data.decode()


def in_lark(text: str) -> str:
    """`text` with Lark for what may be GBNF; empty: it is all Lark. InvalidRequestError where a part is neither."""
    parts = json.loads(text)["grammars"]
    found = [part for part in parts if EITHER in part]
    for part in found:
        try:
            part.update(from_lark(grammar_from("grammar", part.pop(EITHER))))
        except ValueError as error:
            raise InvalidRequestError(f"is neither Lark nor GBNF: {error}") from None
    return json.dumps({"grammars": parts}, ensure_ascii=False) if found else ""


def follow(tokenizer: LLTokenizer, ends: Sequence[int], text: str) -> None:
    """Compile `text` and write the beginning of an output at random; InvalidRequestError says why that failed."""
    state = compile_text(tokenizer, text).matcher().state
    rng = random.Random(0)
    for _ in range(PROBED_TOKENS):
        mask = bytearray(state.compute_bitmask())
        if state.is_error():
            raise InvalidRequestError(reason_of(state))
        for end in ends:
            mask[end // 8] &= ~(1 << end % 8)
        if not any(mask):
            return
        place = rng.randrange(len(mask))
        place = next(i for i in (*range(place, len(mask)), *range(place)) if mask[i])
        state.consume_token(8 * place + rng.choice([bit for bit in range(8) if mask[place] >> bit & 1]))


def serve(source: IO[bytes], out: IO[bytes]) -> None:
    """Answer texts until the router has gone, which raises EOFError or BrokenPipeError.

    SIGPROF, which nothing handles, ends the process where a text takes too long.
    """
    settings = json.loads(read_message(source))
    ends = settings["eos_token"]
    tokenizer = LLTokenizer(settings["tokenizer"], n_vocab=settings["n_vocab"], eos_token=ends)
    while True:
        text = read_message(source)
        verdict = lark = ""
        signal.setitimer(signal.ITIMER_PROF, CHECK_S)
        try:
            lark = in_lark(text)
            if not lark:
                follow(tokenizer, ends, text)
        except InvalidRequestError as error:
            verdict = str(error)
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_message(out, verdict)
        write_message(out, lark)


def main() -> None:
    """What the process does."""
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the router, whose end closes the standard input
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a client could fill the disk with core files
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve_to_the_end)
    thread.start()
    thread.join()


def _serve_to_the_end() -> None:
    with contextlib.suppress(EOFError, BrokenPipeError):
        serve(sys.stdin.buffer, sys.stdout.buffer)
