"""Train the demo model within a limit of wall-clock time.

    python3 train.py --data DATA_FOLDER --out OUT_FOLDER --seconds 560

The learning rate and the phases follow the share of the time that has passed,
so a run always ends annealed. Two phases: rows of 2,048 tokens, mostly running
text; then half chat rows and half rows of running text of 8,192 tokens.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import json
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import data
import numpy as np
import optimizer
import torch
from model import Decoder, Shape
from safetensors.torch import save_file
from torch import Tensor

PIECE = 15 * 2**20
Batch = tuple[Tensor, Tensor]


class Feed:
    """Prepares batches in a thread, by the phase that the trainer is in."""

    def __init__(self, args: argparse.Namespace, arrays: dict[str, Any]) -> None:
        self.args = args
        documents = data.pieces(arrays["text"])
        long = [d for d in documents if len(d) >= args.long // 2]
        self.text = data.TextRows(documents, 1)
        self.long_text = data.TextRows(long or documents, 2)
        self.chat = data.ChatRows(data.pieces(arrays["chat"]), args.assistant, args.short, 3)
        self.final = False
        self.queue: queue.Queue[tuple[bool, list[Batch]]] = queue.Queue(maxsize=6)
        self.sources = (self.text.stream(args.short), self.long_text.stream(args.long),
                        self.text.stream(args.long), self.chat.stream())  # fmt: skip
        threading.Thread(target=self.work, daemon=True).start()

    def mixed(self, share: float) -> Iterator[tuple[data.Tokens, data.Tokens]]:
        """Short rows, a share of them conversations."""
        chance = np.random.default_rng(4)
        while True:
            yield next(self.sources[3] if chance.random() < share else self.sources[0])

    def step(self, turn: int, mixed: Iterator[Any], final: bool) -> list[Batch]:
        """The batches of one optimizer step."""
        short, long = self.args.tokens // self.args.short, self.args.tokens // self.args.long
        if not final:
            return [data.batch(mixed, short), data.batch(mixed, short)]
        running = self.sources[1 + turn % 2]
        return [data.batch(self.sources[3], short), data.batch(running, max(1, long))]

    def work(self) -> None:
        """Fill the queue for ever."""
        mixed, turn = self.mixed(self.args.chat_share), 0
        while True:
            final, turn = self.final, turn + 1
            batches = self.step(turn, mixed, final)
            if torch.cuda.is_available():
                batches = [(a.pin_memory(), b.pin_memory()) for a, b in batches]
            self.queue.put((final, batches))

    def next(self, device: str) -> list[Batch]:
        """The batches of the next step, on the device."""
        _, batches = self.queue.get()
        return [(a.to(device, non_blocking=True), b.to(device, non_blocking=True))
                for a, b in batches]  # fmt: skip


class Trainer:
    """The model, its optimizers and the clock."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.begin = args, time.time()
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(0)
        torch.set_float32_matmul_precision("high")
        self.model = Decoder(Shape(**json.loads(args.shape))).to(self.device)
        self.optimizers = optimizer.make(self.model, args.muon_lr, args.adam_lr, args.decay, self.device == "cuda")
        if self.device == "cuda":
            self.model.stream = torch.bfloat16
        self.base = [[g["lr"] for g in o.param_groups] for o in self.optimizers]
        self.run: Any = torch.compile(self.model, dynamic=False) if args.compile else self.model
        self.arrays = data.load(args.data)
        self.log = (args.out / "log.jsonl").open("a")
        self.tokens = 0

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """The loss of one batch, in bfloat16 arithmetic."""
        with torch.autocast(self.device, torch.bfloat16):
            result: Tensor = self.run(inputs, labels)
        return result

    def prepare(self) -> None:
        """Compile before the clock of the schedule starts; go on without where that fails."""
        try:
            self.warm_up()
        except RuntimeError as error:
            if not self.args.compile:
                raise
            self.say(event="not compiled", error=str(error)[:500])
            self.run = self.model
            self.warm_up()

    def warm_up(self) -> None:
        """Run both row lengths once."""
        for length in (self.args.short, self.args.long):
            rows = max(1, self.args.tokens // length)
            tokens = torch.randint(3, 1000, (rows, length), device=self.device)
            self.loss(tokens, tokens).backward()
            self.model.zero_grad(set_to_none=True)
            if self.device == "cuda":
                torch.cuda.synchronize()
        self.say(event="ready")

    def say(self, **fields: Any) -> None:
        """Write one line of the log, here and on the screen."""
        line = json.dumps({"seconds": round(time.time() - self.begin, 1), **fields})
        self.log.write(line + "\n")
        self.log.flush()
        print(line, flush=True)

    def set_rate(self, share: float, step: int) -> float:
        """Warm up, hold, then go down to zero in a straight line with the time."""
        factor = min(1.0, (step + 1) / self.args.warm_steps)
        factor *= min(1.0, (1.0 - share) / self.args.decay_share)
        factor = max(float(factor), 0.002)
        for one, bases in zip(self.optimizers, self.base, strict=True):
            for group, base in zip(one.param_groups, bases, strict=True):
                group["lr"] = base * factor
        for group in self.optimizers[0].param_groups:
            group["momentum"] = min(0.95, 0.85 + 0.1 * step / 150)
        return factor

    @torch.no_grad()
    def held_out(self, name: str, most: int) -> float:
        """Mean loss per token over held-out rows; of conversations, the answers count."""
        tokens, length = self.arrays[name].astype(np.int64), self.args.short
        rows = max(1, self.args.tokens // length)
        count = min(len(tokens) - 1, most) // (rows * length)
        labels = data.answer_labels(tokens, self.args.assistant) if "chat" in name else tokens
        total, weight = 0.0, 0
        for i in range(max(1, count)):
            at = slice(i * rows * length, (i + 1) * rows * length)
            x, y = tokens[:-1][at], labels[1:][at]
            keep = len(x) // length
            if keep < rows:
                break
            valid = int((y >= 0).sum())
            inputs = torch.from_numpy(x).view(rows, length).to(self.device)
            goals = torch.from_numpy(y).view(rows, length).to(self.device)
            with torch.autocast(self.device, torch.bfloat16):
                loss = self.model(inputs, goals)
            total += float(loss) * valid
            weight += valid
        return total / max(1, weight)

    def save(self) -> None:
        """Write the weights in bfloat16, in pieces of 15 MiB."""
        state = {k: v.detach().to(torch.bfloat16).cpu().contiguous()
                 for k, v in self.model.state_dict().items()}  # fmt: skip
        path = self.args.scratch / "model.safetensors"
        save_file(state, path, metadata={"format": "pt"})
        blob = path.read_bytes()
        for number, start in enumerate(range(0, len(blob), PIECE)):
            piece = self.args.out / f"model.safetensors.{number}"
            piece.write_bytes(blob[start : start + PIECE])

    def one_step(self, feed: Feed, share: float, step: int) -> list[Tensor]:
        """One update; the losses of its batches."""
        factor = self.set_rate(share, step)
        losses = []
        batches = feed.next(self.device)
        for inputs, labels in batches:
            loss = self.loss(inputs, labels)
            (loss / len(batches)).backward()
            losses.append(loss.detach())
            self.tokens += inputs.numel()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for one in self.optimizers:
            one.step()
        self.model.zero_grad(set_to_none=True)
        if step % self.args.log_every == 0:
            self.say(step=step, share=round(share, 4), rate=round(factor, 3), tokens=self.tokens,
                     losses=[round(float(x), 4) for x in losses])  # fmt: skip
        return losses

    def train(self) -> None:
        """Run to the time limit, checking and saving on the way."""
        self.prepare()
        feed = Feed(self.args, self.arrays)
        start, end = time.time(), self.begin + self.args.seconds
        step, checked = 0, 0.0
        while (now := time.time()) < end:
            share = (now - start) / (end - start)
            feed.final = share >= self.args.final_from
            self.one_step(feed, share, step)
            step += 1
            if share - checked > 0.12:
                checked = share
                self.say(step=step, text=self.held_out("text_heldout", 500_000),
                         chat=self.held_out("chat_heldout", 500_000))  # fmt: skip
                self.save()
        self.save()
        self.say(event="end", step=step, tokens=self.tokens, device=self.name(),
                 text_epochs=round(feed.text.epochs + feed.long_text.epochs
                                   * feed.long_text.total / feed.text.total, 2),
                 chat_epochs=round(feed.chat.epochs, 2),
                 text=self.held_out("text_heldout", 10**9),
                 chat=self.held_out("chat_heldout", 10**9))  # fmt: skip

    def name(self) -> str:
        """The name of the device."""
        return torch.cuda.get_device_name() if self.device == "cuda" else "CPU"


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, default=Path("/tmp"))
    parser.add_argument("--seconds", type=float, default=560.0, help="from start to last step")
    parser.add_argument("--shape", default="{}", help="changes to the model's shape, as JSON")
    parser.add_argument("--assistant", type=int, required=True, help='the token "assistant"')
    parser.add_argument("--tokens", type=int, default=131_072, help="tokens in a batch")
    parser.add_argument("--short", type=int, default=2048)
    parser.add_argument("--long", type=int, default=8192)
    parser.add_argument("--chat-share", type=float, default=0.12)
    parser.add_argument("--final-from", type=float, default=0.72)
    parser.add_argument("--decay-share", type=float, default=0.6)
    parser.add_argument("--warm-steps", type=int, default=60)
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=0.003)
    parser.add_argument("--decay", type=float, default=0.02)
    parser.add_argument("--log-every", type=int, default=25)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    args.scratch.mkdir(parents=True, exist_ok=True)
    Trainer(args).train()


if __name__ == "__main__":
    main()
