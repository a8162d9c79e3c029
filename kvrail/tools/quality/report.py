"""What `kvrail quality` prints: a line a codec or form of pages, and a warning where keys ask for care."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from kvrail.tools.quality.measure import Measurement

WIDE_SPREAD = 8.0
"""Above this, a scale that channels of the keys share is too coarse for most of them (docs/quality.md)."""


def report(measured: Measurement, model: str, dtype: str, context_tokens: int, next_tokens: int) -> str:
    """Table and warnings, each line ended by a newline."""
    lines = [
        f"{model}: {measured.contexts} contexts of {context_tokens:,} tokens in {dtype} pages,"
        f" {next_tokens} next tokens each; loss with exact KV {measured.loss:.4f}",
        "",
        *_table(measured),
        "",
        *warnings(measured.key_spreads),
    ]
    return "".join(f"{line}\n" for line in lines[: -1 if not lines[-1] else None])


def record(measured: Measurement, model: str, fingerprint: str, texts: Sequence[str], **asked: Any) -> dict[str, Any]:
    """The figures as JSON has them."""
    return {
        "model": model,
        "model_fingerprint": fingerprint,
        "texts": list(texts),
        **asked,
        **asdict(measured),
        "warnings": list(warnings(measured.key_spreads)),
    }


def warnings(spreads: Sequence[float]) -> Iterator[str]:
    """A line where some layers' keys have channels that are much larger than others."""
    wide = [layer for layer, spread in enumerate(spreads) if spread > WIDE_SPREAD]
    if wide:
        worst = max(wide, key=spreads.__getitem__)
        yield (
            f"warning: channels of the keys differ by more than {WIDE_SPREAD:.0f}x in layers"
            f" {', '.join(map(str, wide))}; worst is layer {worst} with {spreads[worst]:.1f}x: prefer codecs with a"
            " scale a channel for keys, such as int4 or kvcomp, or lossy pages"
        )


def _table(measured: Measurement) -> Iterator[str]:
    width = max(5, *(len(each.name) for each in measured.figures))
    yield f"{'form':<{width}}  {'bits':>6}  {'loss':>7}  {'change':>16}  {'top-1':>6}  {'KL':>8}"
    for each in measured.figures:
        change, error = (100 * number / measured.loss for number in (each.loss - measured.loss, each.error))
        yield (
            f"{each.name:<{width}}  {each.bits:>6.2f}  {each.loss:>7.4f}  {change:>+7.2f}% ±{error:>5.2f}%"
            f"  {each.top1:>6.4f}  {each.kl:>8.5f}"
        )
    yield (
        "bits: a value of the KV, of all stages or of a closed page; change: of the loss, with its standard error;"
        " top-1: tokens with the same likeliest successor; KL: in nats a token"
    )
