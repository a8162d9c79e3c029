"""Read the packed tokens and cut them into training rows."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Tokens = npt.NDArray[np.int64]
END_OF_TEXT, START_OF_TURN, END_OF_TURN = 0, 1, 2
IGNORED = -100


def load(folder: Path) -> dict[str, npt.NDArray[np.uint16]]:
    """The token arrays of a folder that pack.py wrote."""
    sizes = json.loads((folder / "sizes.json").read_text())
    arrays: dict[str, npt.NDArray[np.uint16]] = {}
    with lzma.open(folder / "tokens.xz") as data:
        for name, size in sizes.items():
            arrays[name] = np.frombuffer(data.read(2 * size["tokens"]), dtype="<u2")
    return arrays


def pieces(tokens: npt.NDArray[np.uint16]) -> list[npt.NDArray[np.uint16]]:
    """The documents or conversations of an array, each with its end-of-text token."""
    ends = np.flatnonzero(tokens == END_OF_TEXT) + 1
    return np.split(tokens, ends[:-1]) if len(ends) else [tokens]


def answer_labels(tokens: Tokens, assistant: int) -> Tokens:
    """Labels that count assistant turns with their end-of-turn token, and nothing else."""
    starts = tokens == START_OF_TURN
    role = np.concatenate([tokens[1:], [0]])
    inside = np.zeros(len(tokens), dtype=bool)
    marks = np.flatnonzero(starts)
    speaking = role[marks] == assistant
    ends = np.flatnonzero(tokens == END_OF_TURN)
    for mark in marks[speaking]:
        after = np.searchsorted(ends, mark)
        stop = ends[after] if after < len(ends) else len(tokens) - 1
        inside[mark + 3 : stop + 1] = True  # after <|im_start|>, "assistant" and the newline
    return np.where(inside, tokens, IGNORED)


class TextRows:
    """Rows of running text: shuffled documents, joined and cut at the row length."""

    def __init__(self, documents: list[npt.NDArray[np.uint16]], seed: int) -> None:
        self.documents, self.random, self.epochs = documents, np.random.default_rng(seed), 0.0
        self.total = sum(map(len, documents))

    def stream(self, length: int) -> Iterator[tuple[Tokens, Tokens]]:
        """Endless rows of inputs and labels."""
        while True:
            order = self.random.permutation(len(self.documents))
            joined = np.concatenate([self.documents[i] for i in order])
            first = int(self.random.integers(0, length))
            for start in range(first, len(joined) - length - 1, length):
                row = joined[start : start + length + 1].astype(np.int64)
                self.epochs += length / self.total
                yield row[:-1], row[1:]


class ChatRows:
    """Rows of whole conversations: each row starts with one, the last one is cut."""

    def __init__(self, chats: list[npt.NDArray[np.uint16]], assistant: int, length: int, seed: int) -> None:
        self.chats, self.assistant, self.length = chats, assistant, length
        self.random, self.epochs = np.random.default_rng(seed), 0.0

    def stream(self) -> Iterator[tuple[Tokens, Tokens]]:
        """Endless rows of inputs and labels, only the answers counted."""
        while True:
            parts: list[npt.NDArray[np.uint16]] = []
            room = self.length + 1
            for index in self.random.permutation(len(self.chats)):
                parts.append(self.chats[index])
                room -= len(parts[-1])
                self.epochs += 1 / len(self.chats)
                if room <= 0:
                    row = np.concatenate(parts)[: self.length + 1].astype(np.int64)
                    parts, room = [], self.length + 1
                    yield row[:-1], answer_labels(row, self.assistant)[1:]


def batch(rows: Iterator[tuple[Tokens, Tokens]], count: int) -> tuple[Tensor, Tensor]:
    """The next rows as two tensors."""
    picked = [next(rows) for _ in range(count)]
    inputs = torch.from_numpy(np.stack([p[0] for p in picked]))
    labels = torch.from_numpy(np.stack([p[1] for p in picked]))
    return inputs, labels
