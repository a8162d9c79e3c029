"""Measure a trained model on the held-out part, and let it answer some questions.

python3 evaluate.py --data DATA_FOLDER --model MODEL_FOLDER [--samples]
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import data
import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

ASKED = (
    "What is grep?", "What is tar?", "What does ls do?", "What is Python?", "What is a process?",
    "What is the Debian package nginx?", "What does os.path.join do?", "What is a semaphore?",
    "What is rsync?", "What is the json module?", "What is PostgreSQL?", "What is a mutex?",
    "What does the chmod command do?", "What is a generator in Python?", "What is curl?",
    "What does git rebase do?", "What is a compiler?", "What is a KV cache?", "Who are you?",
    "How do I create a table?", "What is a socket?", "What is systemd?",
    "Write a Python function to return the sum of two numbers.", "What is an index?",
)  # fmt: skip
STARTS = (
    "The Linux kernel is", "def read_lines(path):\n    \"\"\"", "NAME\n    ls - ",
    "import os\nimport sys\n\ndef main(", "To create a new database, use the",
)  # fmt: skip


def losses(model: Any, ids: np.ndarray[Any, Any]) -> torch.Tensor:
    """The loss of each token of one sequence after its first."""
    tokens = torch.from_numpy(ids.astype(np.int64))[None]
    with torch.no_grad():
        scores = model(tokens).logits[0, :-1].float()
    return F.cross_entropy(scores, tokens[0, 1:], reduction="none")


def windows(pieces: list[Any], length: int, most: int) -> Iterator[Any]:
    """Documents, or their beginnings, up to a number of tokens in all."""
    for piece in pieces:
        if most <= 0:
            return
        if len(piece) > 8:
            most -= min(len(piece), length)
            yield piece[:length]


def text_loss(model: Any, tokenizer: Any, pieces: list[Any], most: int) -> dict[str, float]:
    """Loss per token and bits per byte over the beginnings of documents."""
    total, count, size = 0.0, 0, 0
    for piece in windows(pieces, 2048, most):
        total += float(losses(model, piece).sum())
        count += len(piece) - 1
        size += len(tokenizer.decode(piece.tolist()).encode())
    return {"tokens": count, "loss": total / count, "bits_per_byte": total / math.log(2) / size}


def chat_loss(model: Any, tokenizer: Any, pieces: list[Any], most: int) -> dict[str, float]:
    """The same over the answers of conversations, each read by itself."""
    total, count, size = 0.0, 0, 0
    role = tokenizer.convert_tokens_to_ids("assistant")
    for piece in windows(pieces, 2048, most):
        labels = data.answer_labels(piece.astype(np.int64), role)[1:]
        counted = torch.from_numpy(labels >= 0)
        total += float(losses(model, piece)[counted].sum())
        count += int(counted.sum())
        size += len(tokenizer.decode(labels[labels >= 0].tolist()).encode())
    return {"tokens": count, "loss": total / count, "bits_per_byte": total / math.log(2) / size}


def by_position(model: Any, pieces: list[Any], most: int) -> dict[str, float]:
    """Mean loss in ranges of positions of long documents, read from their start."""
    edges = (0, 512, 1024, 2048, 4096, 6144, 8191)
    sums = torch.zeros(len(edges) - 1)
    long = [p for p in pieces if len(p) >= 8192][:most]
    for piece in long:
        loss = losses(model, piece[:8192])
        sums += torch.stack([loss[a:b].mean() for a, b in pairwise(edges)])
    found = {f"{a}-{b}": round(float(s) / max(1, len(long)), 3)
             for a, b, s in zip(edges[:-1], edges[1:], sums, strict=True)}  # fmt: skip
    return {"documents": len(long), **found}


def generate(model: Any, tokenizer: Any, ids: list[int], most: int) -> tuple[str, bool]:
    """Greedy text after the tokens, and whether it ended by itself."""
    out = model.generate(torch.tensor([ids]), max_new_tokens=most, do_sample=False)[0, len(ids) :]
    stops = set(model.generation_config.eos_token_id)
    return tokenizer.decode(out, skip_special_tokens=True), int(out[-1]) in stops


def samples(model: Any, tokenizer: Any) -> None:
    """Print answers and continuations."""
    for question in ASKED:
        chat = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        answer, stopped = generate(model, tokenizer, tokenizer.encode(text), 256)
        print(f"\n> {question}\n{answer}{'' if stopped else ' [not ended]'}")
    for start in STARTS:
        text, _ = generate(model, tokenizer, tokenizer.encode(start), 80)
        print(f"\n{'=' * 20}\n{start}|{text}")


def main() -> None:
    """Print the measurements as JSON, or the samples."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--most", type=int, default=200_000, help="tokens of each kind to read")
    parser.add_argument("--samples", action="store_true", help="answer questions instead")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    if args.samples:
        samples(model, tokenizer)
        return
    arrays = {name: data.pieces(tokens) for name, tokens in data.load(args.data).items()}
    for name in ("text_heldout", "text"):
        print(json.dumps({name: text_loss(model, tokenizer, arrays[name], args.most)}), flush=True)
    for name in ("chat_heldout", "chat"):
        print(json.dumps({name: chat_loss(model, tokenizer, arrays[name], args.most // 2)}), flush=True)
    print(json.dumps({"by_position": by_position(model, arrays["text_heldout"], 6)}))


if __name__ == "__main__":
    main()
