"""Encode corpus and conversations as token files for train.py.

    python3 pack.py --work SCRATCH_FOLDER --model MODEL_FOLDER --out DATA_FOLDER

writes text.bin, chat.bin, text_heldout.bin and chat_heldout.bin: little-endian
16-bit tokens, each document or conversation followed by the end-of-text token,
in the order of a fixed shuffle, all in one xz archive; and sizes.json.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import json
import lzma
import random
from pathlib import Path
from typing import Any

import numpy as np
from tokenizer import END_OF_TEXT, END_OF_TURN, START_OF_TURN
from tokenizers import Tokenizer

FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 256 << 20,
            "lc": 3, "lp": 1, "pb": 1}]  # fmt: skip


def render(messages: list[dict[str, str]]) -> str:
    """A conversation as the chat template writes it."""
    return "".join(f"{START_OF_TURN}{m['role']}\n{m['content']}{END_OF_TURN}\n" for m in messages)


def encode(tokenizer: Tokenizer, texts: list[str]) -> bytes:
    """The tokens of the texts, each ended by the end-of-text token."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    parts: list[bytes] = []
    for start in range(0, len(texts), 2000):
        for encoding in tokenizer.encode_batch(texts[start : start + 2000]):
            parts.append(np.array([*encoding.ids, end], dtype="<u2").tobytes())
    return b"".join(parts)


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file, shuffled."""
    with path.open() as lines:
        rows = [json.loads(line) for line in lines]
    random.Random(3).shuffle(rows)
    return rows


def main() -> None:
    """Encode, compress and say how much there is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--most", type=int, default=10**12, help="bytes of text to take")
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    args.out.mkdir(parents=True, exist_ok=True)
    parts: dict[str, list[str]] = {}
    room = args.most
    for row in read(args.work / "corpus.jsonl"):
        room -= len(row["text"])
        if room > 0 or row["heldout"]:
            parts.setdefault("text_heldout" if row["heldout"] else "text", []).append(row["text"])
    for row in read(args.work / "questions.jsonl"):
        name = "chat_heldout" if row["heldout"] else "chat"
        parts.setdefault(name, []).append(render(row["messages"]))
    sizes: dict[str, dict[str, int]] = {}
    with lzma.open(args.out / "tokens.xz", "wb", filters=FILTERS) as out:
        for name, texts in parts.items():
            data = encode(tokenizer, texts)
            size = sum(len(t.encode()) for t in texts)
            sizes[name] = {"tokens": len(data) // 2, "bytes": size, "pieces": len(texts)}
            out.write(data)
            print(name, sizes[name], flush=True)
    (args.out / "sizes.json").write_text(json.dumps(sizes, indent=1) + "\n")


if __name__ == "__main__":
    main()
