"""Clients that read a stream more simply than the standard says, rebuilt from what they are known to do."""

import json
from collections.abc import Iterable


def vllm_texts(reads: Iterable[bytes]) -> list[str]:
    """What vLLM's load generator (vllm/benchmarks/lib/endpoint_request_func.py) makes of each network read.

    It strips each read, which takes the empty line behind an event away, and skips what begins with a colon.
    """
    kept, found = "", []
    for read in filter(None, map(bytes.strip, reads)):
        kept += read.decode()
        *messages, kept = kept.split("\n\n")
        rest = kept.removeprefix("data: ").strip()
        if kept.startswith("data: ") and (rest == "[DONE]" or _is_json(rest)):
            messages.append(kept)
            kept = ""
        events = [message.strip() for message in messages if message.strip()[:1] not in ("", ":")]
        found += [event.removeprefix("data: ") for event in events]
    assert not kept, f"it still waits for the end of {kept!r}"
    return found


def sglang_texts(reads: Iterable[bytes]) -> list[str]:
    """What sglang.bench_serving makes of each line: each that is not empty must be an event's JSON or [DONE]."""
    lines = filter(None, map(bytes.strip, b"".join(reads).split(b"\n")))
    found = [line.decode().removeprefix("data: ") for line in lines]
    assert all(text == "[DONE]" or _is_json(text) for text in found), found
    return found


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
