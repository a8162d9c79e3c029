"""How many drafts coarse KV gets accepted through the whole system, and what its first stage weighs."""

import statistics
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.anchor_drafts import DEMO, DRAFTS, UNSEEN
from benchmarks.codec_tables import Table
from kvrail.codec import registry
from kvrail.config.settings import DecodeSettings
from kvrail.engine.batch.batch import SequenceSlice
from kvrail.engine.model.loader import load_model
from kvrail.engine.step.runner import ModelRunner
from kvrail.text import load_tokenizer
from kvrail.transfer.pieces import Piece, cut
from kvrail.transfer.sizes import USUAL_FRAME_BYTES, first_recent_page, pages_per_frame
from kvrail.transfer.streams import SideStream
from kvrail.worker.pages import LeasedPages

FILES = (*UNSEEN, "torch/optim/lr_scheduler.py")
"""Of installed packages, one context of a length each; the demo model's own held-out text is too short."""
POSITIONS = (1, 10, 20, 32)
PAGE_BITS = 16
"""Bits of a value of uncompressed KV."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bits a value. coarse: of what drafts wait for, recent pages with all their stages; total: of everything."""

    coarse: float
    total: float


def contexts(lengths: Sequence[int]) -> list[list[int]]:
    """Token ids of text that the demo model has not seen, one context of each file and length that has one.

    Each length reads another place of a file.
    """
    tokenizer = load_tokenizer(str(DEMO))
    packages = Path(sysconfig.get_path("purelib"))
    found = []
    for path in (packages / name for name in FILES):
        tokens = tokenizer.encode(path.read_text(encoding="utf-8"), add_special_tokens=True)
        for number, length in enumerate(lengths):
            start = (number + 1) * (len(tokens) - length) // (len(lengths) + 1)
            if len(tokens) > length:
                found.append(tokens[start : start + length])
    return found


def sizes(prompts: Iterable[Sequence[int]], codecs: Sequence[str]) -> dict[str, list[Sizes]]:
    """By codec, what each prompt's KV comes to, cut into frames as a prefill worker does it."""
    settings = DecodeSettings.load()
    page_size = settings.page_size
    loaded = load_model(
        str(DEMO),
        device="cpu",
        dtype="auto",
        kv_dtype=settings.kv_dtype,
        page_size=page_size,
        load_format="safetensors",
    )
    step, layout = settings.max_batch_tokens, loaded.layout
    found: dict[str, list[Sizes]] = {name: [] for name in codecs}
    for prompt in prompts:
        pages = range(layout.pages_for(len(prompt)))
        runner = ModelRunner(loaded, len(pages), max_running=1, max_batch_tokens=step, cuda_graphs=False, compile=False)
        for start in range(0, len(prompt), step):
            runner.execute([SequenceSlice(prompt[start : start + step], start, pages, num_logits=0)])
        held = LeasedPages(runner.cache, SideStream(loaded.device), pages, len(prompt))
        held.fill_tail(range(layout.num_layers))
        recent = first_recent_page(len(prompt), page_size)
        whole = Piece(0, layout.num_layers, 0, len(pages), None)
        pieces = list(cut([whole], 0, pages_per_frame(layout, USUAL_FRAME_BYTES), recent))
        values = layout.page_bytes * len(pages) * 8 / PAGE_BITS
        for name in codecs:
            coarse = total = 0
            for piece in pieces:
                part = held.block(range(piece.first_layer, piece.end_layer), piece.first_page, piece.end_page)
                stages = [payload.nbytes for payload in registry.get(name).encode(part).stages()]
                coarse += sum(stages) if piece.first_page >= recent else stages[0]
                total += sum(stages)
            found[name].append(Sizes(coarse * 8 / values, total * 8 / values))
    return found


def table(
    lengths: Sequence[int],
    rate: str,
    accepted: dict[str, list[int]],
    bits: dict[str, float],
    held: dict[str, list[Sizes]],
) -> Table:
    """accepted: of each context, by codec; bits: a value, as they travelled; held: the same pages, encoded here."""
    rows = []
    for codec, counts in accepted.items():
        coarse, total = (statistics.mean(getattr(each, name) for each in held[codec]) for name in ("coarse", "total"))
        if abs(total - bits[codec]) > 0.01 * total:
            raise SystemExit(f"{codec}: {bits[codec]:.3f} bits a value travelled, but encoding gives {total:.3f}")
        error = statistics.stdev(counts) / len(counts) ** 0.5
        shares = [f"{sum(count >= k for count in counts) / len(counts):.2f}" for k in POSITIONS]
        cells = [f"{coarse:.2f}", f"{bits[codec]:.2f}", f"{statistics.mean(counts):.1f} ± {error:.1f}", *shares]
        rows.append([codec, str(len(counts)), *cells])
    header = (
        "codec",
        "contexts",
        "bits a value before drafts",
        "bits a value in all",
        f"accepted of {DRAFTS}",
        *(f"P(≥{k})" for k in POSITIONS),
    )
    notes = (
        f"Greedy; contexts of {', '.join(f'{length:,}' for length in lengths)} tokens of held-out text at {rate}, where"
        f" all {DRAFTS} drafts, or a wrong one, are made before the last stage is here. ±: standard error over"
        " contexts. Bits in all: as the workers counted them. Bits before drafts: the first stage, and recent pages"
        " whole, of the same pages."
    )
    return Table("Drafts accepted", header, rows, notes)
