"""Histograms of exponents, and the window that covers most of one (SplitZip, section 3.3).

A histogram is int64 [exponents]: how many values have each exponent. Windows wrap around, as the code does (README.md).
"""

import numpy as np
import numpy.typing as npt

from kvrail.codec.core.floats import FloatFormat

Histogram = npt.NDArray[np.int64]


def histogram(bits: npt.NDArray[np.unsignedinteger], format: FloatFormat) -> Histogram:
    """How often each exponent occurs; bits: elements of `format` as unsigned integers, any shape."""
    exponents = bits >> format.mantissa_bits & format.exponents - 1
    return np.bincount(exponents.reshape(-1), minlength=format.exponents).astype(np.int64)


def coverage(histogram: Histogram, top: int, width: int) -> float:
    """Fraction of the values whose exponent is in (top - width, top]; 1 for no values."""
    return set_coverage(histogram, (top - np.arange(width)) % histogram.size)


def set_coverage(histogram: Histogram, exponents: npt.NDArray[np.int64]) -> float:
    """Fraction of the values whose exponent is one of `exponents`, none twice; 1 for no values."""
    total = int(histogram.sum())
    return int(histogram[exponents].sum()) / total if total else 1.0


def best_window(histogram: Histogram, width: int) -> int:
    """Top of the run of `width` exponents with the largest count; of several, the highest."""
    tops = np.arange(histogram.size)
    counts = histogram[(tops[:, None] - np.arange(width)) % histogram.size].sum(axis=1)
    return int(tops[counts == counts.max()][-1])


def best_set(histogram: Histogram, width: int) -> npt.NDArray[np.int64]:
    """The `width` most frequent exponents, most frequent first, lower ones first among equals: the paper's codebook."""
    return np.argsort(-histogram, kind="stable")[:width]


def entropy_bits(histogram: Histogram) -> float:
    """Entropy of the exponents, in bits a value: no code of single exponents is shorter."""
    shares = histogram[histogram > 0] / max(int(histogram.sum()), 1)
    return float(-(shares * np.log2(shares)).sum()) + 0.0
