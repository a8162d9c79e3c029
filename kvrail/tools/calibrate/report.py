"""What `kvrail calibrate` prints: a line a layer, and which layers the windows fit badly."""

from collections.abc import Iterator
from pathlib import Path

from kvrail.codec.splitzip.one_stage.codebook import Codebook, DtypeWindows, TensorWindows

LOW_COVERAGE = 0.99
"""Below this, escapes begin to cost more than a hundredth of the tensor (SplitZip, section 4.3.6)."""


def report(codebook: Codebook, dtype: str, out: Path) -> str:
    """Table, warnings and closing lines, each ended by a newline."""
    windows = codebook.dtypes[dtype]
    scope = "one window for all layers" if codebook.shared else "one window a layer"
    lines = [
        f"{codebook.model}: exponents of the {dtype} KV cache of {windows.tokens:,} tokens, {scope}",
        "",
        *_table(codebook, windows),
        "",
        *_warnings(windows),
        f"wrote {out}: codebook {codebook.id:016x} of model {codebook.model_fingerprint[:12]}",
    ]
    return "".join(f"{line}\n" for line in lines)


def _table(codebook: Codebook, windows: DtypeWindows) -> Iterator[str]:
    best = f"best {windows.window}"
    yield f"{'layer':>5}  {'K top':>5}  {'coverage':>9}  {best:>9}  {'V top':>5}  {'coverage':>9}  {best:>9}"
    for layer in range(codebook.num_layers):
        cells = (_cells(tensor, layer) for tensor in (windows.keys, windows.values))
        yield f"{layer:>5}  {'  '.join(cells)}"
    yield f"top: the window's largest exponent; best {windows.window}: what the most frequent exponents would cover"


def _cells(tensor: TensorWindows, layer: int) -> str:
    top = tensor.tops[0 if len(tensor.tops) == 1 else layer]
    return f"{top:>5}  {tensor.coverage[layer]:>9.3%}  {tensor.best_set_coverage[layer]:>9.3%}"


def _warnings(windows: DtypeWindows) -> Iterator[str]:
    for name, tensor in (("keys", windows.keys), ("values", windows.values)):
        low = [layer for layer, share in enumerate(tensor.coverage) if share < LOW_COVERAGE]
        if low:
            worst = min(low, key=tensor.coverage.__getitem__)
            yield (
                f"warning: the window covers less than {LOW_COVERAGE:.0%} of the {name} of layers "
                f"{', '.join(map(str, low))}; worst is layer {worst} with {tensor.coverage[worst]:.3%}"
            )
