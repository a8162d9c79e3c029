"""KV to compress, laid out as pages [layers, pages, 64, kv_heads, dim], and the windows that fit it.

real: what the engine leaves in its pages when the demo model reads the repository's own text. synthetic: channels with
log-normal scales times normal values, the spread tuned to a rate of escapes; SplitZip's paper has 0.16 %. random-8b:
the engine's KV of two layers of Qwen3-8B's shape with random weights.
"""

import functools
import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.shapes import SHAPES
from kvrail.codec.base import Block
from kvrail.codec.splitzip.one_stage.exponents import Histogram, best_window, coverage, histogram
from kvrail.codec.splitzip.tiles.format import FORMATS
from kvrail.engine.batch.batch import SequenceSlice
from kvrail.engine.model.loader import LoadedModel, load_model
from kvrail.engine.step.runner import ModelRunner
from kvrail.text import load_tokenizer

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "models" / "kvrail-demo"
PAGE_SIZE = 64
SEQUENCE = 2048
REAL_TOKENS = 8192
"""The engine computes no more for one source; larger sizes repeat its pages."""
SMALL_VOCABULARY = 4096
FRESH_PAGES = 64
"""Of synthetic KV; more repeat these."""
RANDOM_MIB = 16
"""KV of the random model's sequence. More would repeat it, which zstd would find."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where KV comes from. note: what a reader must know of it."""

    name: str
    note: str
    block: Block


def bits_of(tensor: torch.Tensor) -> npt.NDArray[np.unsignedinteger]:
    """Elements of a tensor on the host as unsigned integers."""
    integers = tensor.view(torch.uint8 if tensor.element_size() == 1 else torch.int16)
    return integers.numpy().view(f"u{tensor.element_size()}")


def histograms(tensor: torch.Tensor) -> Histogram:
    """Of keys or values: int64 [layers, exponents]; counted where the tensor lies."""
    form = FORMATS[str(tensor.dtype).removeprefix("torch.")]
    if not tensor.is_cuda:
        return np.stack([histogram(bits_of(layer), form) for layer in tensor])
    integers = tensor.view(torch.uint8 if form.item_bytes == 1 else torch.int16).flatten(1)
    exponents = integers.int() >> form.mantissa_bits & form.exponents - 1
    return np.stack([torch.bincount(layer, minlength=form.exponents).cpu().numpy() for layer in exponents])


class Windows:
    """The best windows of a block, in a codebook's place. shared: one for all layers, else one a layer."""

    def __init__(self, block: Block, width: int, *, shared: bool) -> None:
        self.id = 1
        self._tops = {}
        for kind, tensor in (("keys", block.keys), ("values", block.values)):
            found = histograms(tensor)
            each = [found.sum(axis=0)] * len(found) if shared else list(found)
            self._tops[kind] = np.array([best_window(one, width) for one in each], dtype=np.int64)

    def tops(self, dtype: str, kind: str, layers: range) -> npt.NDArray[np.int64]:
        """Largest exponent of the window of each of `layers`."""
        return self._tops[kind][layers.start : layers.stop]


def corpus(domain: str = "all") -> str:
    """Text: "heldout" that the demo model never saw, this repository's "docs" or "code", or the first two as "all"."""
    if domain == "all":
        return corpus("heldout") + "\n\n" + corpus("docs")
    if domain == "heldout":
        return (DEMO / "heldout.txt").read_text(encoding="utf-8")
    patterns = {
        "docs": ("*.md", "docs/**/*.md", "kvrail/codec/**/*.md", "models/*/README.md"),
        "code": ("kvrail/**/*.py",),
    }
    files = sorted({path for pattern in patterns[domain] for path in ROOT.glob(pattern)})
    return "\n\n".join(path.read_text(encoding="utf-8") for path in files)


def real(dtype: str, mib: float, domain: str = "all") -> Source:
    """KV of the demo model; dtype: element type of the pages."""
    loaded = _load(DEMO, dtype, "safetensors")
    needed = math.ceil(mib * (1 << 20) / loaded.layout.page_bytes) * PAGE_SIZE
    text = load_tokenizer(str(DEMO)).encode(corpus(domain), add_special_tokens=True)
    tokens = text[: _whole(min(needed, REAL_TOKENS, len(text)))]
    block = tiled(prefill(loaded, tokens), mib)
    repeated = "" if needed <= len(tokens) else f", repeated to {needed:,}"
    return Source("real", f"demo model, {len(tokens):,} tokens of text ({domain}){repeated}", block)


def random_8b(mib: float) -> Source:
    """KV of two layers of Qwen3-8B's shape, random weights and tokens."""
    config = {**SHAPES["qwen3-8b"], "num_hidden_layers": 2, "vocab_size": SMALL_VOCABULARY, "eos_token_id": 0}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        loaded = _load(Path(folder), "bfloat16", "dummy")
    tokens = torch.randint(SMALL_VOCABULARY, (SEQUENCE,), generator=torch.Generator().manual_seed(0)).tolist()
    note = f"2 layers of Qwen3-8B's shape, random weights, {SEQUENCE:,} random tokens"
    return Source("random-8b", note, tiled(prefill(loaded, tokens), mib))


def synthetic(mib: float, escapes: float, dtype: torch.dtype = torch.bfloat16) -> Source:
    """Log-normal channels of 4 layers with 8 heads of 128; `escapes` of the values lie outside windows of 16."""
    layers, heads, dim = 4, 8, 128
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(2, layers, 1, 1, heads, dim, generator=generator)
    low, high = 0.1, 6.0
    while high - low > 0.002:
        middle = (low + high) / 2
        low, high = (low, middle) if _escapes(_draw(spread, middle, 4, dtype)) > escapes else (middle, high)
    page_bytes = 2 * layers * PAGE_SIZE * heads * dim * dtype.itemsize
    pages = max(1, round(mib * (1 << 20) / page_bytes))
    block = _draw(spread, low, min(pages, FRESH_PAGES), dtype)
    note = f"channels exp({low:.2f} N(0, 1)) times N(0, 1), {_escapes(block):.3%} outside the best windows of 16"
    return Source(f"synthetic-{escapes:.2%}", note, tiled(block, mib))


def tiled(block: Block, mib: float) -> Block:
    """The block's pages, repeated or cut so that they take `mib` MiB."""
    have = block.keys.shape[1]
    wanted = max(1, round(mib * (1 << 20) * have / block.spec.raw_bytes))
    index = torch.arange(wanted) % have
    return Block(*(_select(tensor, index) for tensor in block.tensors()))


def prefill(loaded: LoadedModel, tokens: Sequence[int]) -> Block:
    """What the engine leaves in its pages for `tokens`, in sequences of SEQUENCE tokens; whole pages."""
    runner = ModelRunner(
        loaded, len(tokens) // PAGE_SIZE, max_running=1, max_batch_tokens=SEQUENCE, cuda_graphs=False, compile=False
    )
    for start in range(0, len(tokens), SEQUENCE):
        part = tokens[start : start + SEQUENCE]
        pages = range(start // PAGE_SIZE, (start + len(part)) // PAGE_SIZE)
        runner.execute([SequenceSlice(part, 0, pages, num_logits=0)])
    return Block(*runner.cache.as_block())


@functools.cache
def _load(folder: Path, dtype: str, load_format: str) -> LoadedModel:
    return load_model(
        str(folder), device="cpu", dtype="auto", kv_dtype=dtype, page_size=PAGE_SIZE, load_format=load_format
    )


def _whole(tokens: int) -> int:
    return tokens // PAGE_SIZE * PAGE_SIZE


def _select(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    as_bytes = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    return as_bytes.index_select(1, index.to(tensor.device)).view(tensor.dtype)


def _draw(spread: torch.Tensor, sigma: float, pages: int, dtype: torch.dtype) -> Block:
    layers, heads, dim = spread.shape[1], *spread.shape[-2:]
    generator = torch.Generator().manual_seed(1)
    tensors = [
        (torch.randn(layers, pages, PAGE_SIZE, heads, dim, generator=generator) * (sigma * scale).exp()).to(dtype)
        for scale in spread
    ]
    return Block(*tensors)


def _escapes(block: Block) -> float:
    """Fraction of all values outside the best windows of 16, one a layer for keys and one for values."""
    found = np.concatenate([histograms(block.keys), histograms(block.values)])
    return 1 - float(np.mean([coverage(each, best_window(each, 16), 16) for each in found]))
