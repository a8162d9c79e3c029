"""Points of KVComp on the demo model: granularity and scale of keys and values, also with outlier channels.

    python -m benchmarks.kvcomp_points [--text FILE ...] [--contexts 8] [--factor 16]

With `--factor`, some pairs of each head's key channels are that much larger and the queries' as much smaller, so that
the model computes the same function. Prints Markdown.
"""

import argparse
from pathlib import Path

import torch

from benchmarks.facts import say
from kvrail.codec.integer.codec import int4
from kvrail.codec.papers.kvcomp.codec import KVCompCodec
from kvrail.codec.papers.kvcomp.format import Granularity, KVCompCode, TensorCode
from kvrail.config.settings import DEMO_MODEL
from kvrail.engine.model.loader import LoadedModel, load_model
from kvrail.text.samples import read_samples
from kvrail.tools.quality.lossy import OnTheWire
from kvrail.tools.quality.main import windows_of
from kvrail.tools.quality.measure import measure
from kvrail.tools.quality.options import PAGE_SIZE, Options

PAIRS = (3, 11, 20, 27)
"""Rotary pairs of a head whose channels `--factor` scales."""
BLOCK, CHANNEL, TOKEN = Granularity
POINTS = (
    (BLOCK, 0.05, 0.15),
    (BLOCK, 0.03, 0.08),
    (CHANNEL, 0.05, 0.15),
    (CHANNEL, 0.25, 0.15),
    (CHANNEL, 0.05, 0.05),
)
"""Granularity and scale of the keys, scale of the values."""


def codec_of(granularity: Granularity, keys: float, values: float) -> KVCompCodec:
    """A codec named after its parameters."""
    code = KVCompCode(TensorCode(granularity, keys), TensorCode(TOKEN, values))
    return KVCompCodec(f"keys {granularity.name} {keys:g}, values TOKEN {values:g}", code)


def scale_channels(loaded: LoadedModel, factor: float) -> None:
    """Make channels of PAIRS larger in all keys, and smaller in all queries."""
    with torch.no_grad():
        for layer in loaded.layers:
            attention = layer.self_attn
            half = attention.k_norm.weight.numel() // 2
            channels = [channel for pair in PAIRS for channel in (pair, pair + half)]
            attention.k_norm.weight[channels] *= factor
            attention.q_norm.weight[channels] /= factor


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kvcomp_points", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--text", action="append", type=Path, default=[], help="default: the demo model's heldout.txt")
    parser.add_argument("--contexts", type=int, default=8)
    parser.add_argument("--context-tokens", type=int, default=256)
    parser.add_argument("--next-tokens", type=int, default=64)
    parser.add_argument("--factor", type=float, default=16.0)
    args = parser.parse_args()
    say("benchmarks.kvcomp_points")
    texts = tuple(args.text) or (Path(DEMO_MODEL) / "heldout.txt",)
    counts = (args.contexts, args.context_tokens, args.next_tokens)
    options = Options(DEMO_MODEL, texts, (), (), *counts, dtype="bfloat16", device="cpu", json=None)
    share = -(-options.contexts // len(texts))
    windows = windows_of(read_samples(DEMO_MODEL, texts, share * options.length), options)
    codecs = [int4(), *(codec_of(*point) for point in POINTS)]
    results = []
    for factor in (1.0, args.factor):
        loaded = load_model(
            DEMO_MODEL, device="cpu", dtype="auto", kv_dtype="bfloat16", page_size=PAGE_SIZE, load_format="safetensors"
        )
        scale_channels(loaded, factor)
        results.append(measure(loaded, windows, options.context_tokens, [OnTheWire(codec) for codec in codecs]))
    print(f"{len(windows)} contexts of {options.context_tokens} tokens, {options.next_tokens} next tokens each")
    print(f"\n| codec | bits | change of the loss, % | top-1 | KL | key channels x {args.factor:g}: change, % | KL |")
    print("|" + "---|" * 7)
    for plain, large in zip(results[0].figures, results[1].figures, strict=True):
        changes = [
            f"{100 * (each.loss / result.loss - 1):+.2f} ± {100 * each.error / result.loss:.2f}"
            for result, each in zip(results, (plain, large), strict=True)
        ]
        print(
            f"| {plain.name} | {plain.bits:.2f} | {changes[0]} | {plain.top1:.3f} | {plain.kl:.4f} "
            f"| {changes[1]} | {large.kl:.4f} |"
        )


if __name__ == "__main__":
    main()
