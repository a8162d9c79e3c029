"""Runs `kvrail calibrate`: text through the model, exponents counted, windows chosen, codebook written."""

import sys
from collections.abc import Sequence
from pathlib import Path

from kvrail.codec.splitzip.one_stage.codebook import WINDOWS, Codebook, CodebookError, DtypeWindows, TensorWindows
from kvrail.codec.splitzip.one_stage.exponents import (
    Histogram,
    best_set,
    best_window,
    coverage,
    entropy_bits,
    set_coverage,
)
from kvrail.engine.model.loader import LoadedModel, load_model
from kvrail.errors import ConfigError
from kvrail.text import load_tokenizer
from kvrail.tools.calibrate.measure import Measurement, measure
from kvrail.tools.calibrate.options import MIN_TOKENS, Options
from kvrail.tools.calibrate.report import report
from kvrail.worker.packed.weights import PackedWeights

PAGE_SIZE = 64
CHARACTERS_PER_TOKEN = 32
"""No text has longer tokens on average: of a file, no more is read than this many for each token that is wanted."""


def run(options: Options) -> int:
    """Calibrate; returns the exit status. Raises ConfigError or UnsupportedModelError, with nothing written."""
    texts = _read(options)
    loaded = _load(options)
    measured = measure(loaded, texts)
    codebook = make_codebook(
        measured,
        model=Path(options.model).name,
        fingerprint=loaded.fingerprint,
        dtype=options.dtype,
        shared=options.shared,
        comment=f"text: {', '.join(path.name for path in options.texts)}",
    )
    try:
        codebook.save(options.out)
    except CodebookError as error:
        raise ConfigError(f"--out: {error}") from None
    sys.stdout.write(report(codebook, options.dtype, options.out))
    return 0


def make_codebook(
    measured: Measurement, *, model: str, fingerprint: str, dtype: str, shared: bool, comment: str
) -> Codebook:
    """The codebook whose windows cover most of what was measured, for each layer or for all layers together."""
    width = WINDOWS[dtype]
    return Codebook(
        format="kvrail-codebook",
        version=1,
        model=model,
        model_fingerprint=fingerprint,
        comment=comment,
        num_layers=len(measured.keys),
        shared=shared,
        dtypes={
            dtype: DtypeWindows(
                window=width,
                tokens=measured.tokens,
                keys=describe(measured.keys, best_tops(measured.keys, width, shared=shared), width),
                values=describe(measured.values, best_tops(measured.values, width, shared=shared), width),
            )
        },
    )


def best_tops(histograms: Histogram, width: int, *, shared: bool) -> list[int]:
    """The best window's top of each layer, or the one that is best for all; histograms: int64 [layers, exponents]."""
    return [best_window(each, width) for each in ([histograms.sum(axis=0)] if shared else histograms)]


def describe(histograms: Histogram, tops: Sequence[int], width: int) -> TensorWindows:
    """How well windows fit each layer; tops: one for all layers or one a layer; figures to six decimals."""
    each = list(tops) * len(histograms) if len(tops) == 1 else tops
    return TensorWindows(
        tops=tuple(tops),
        coverage=tuple(round(coverage(h, top, width), 6) for h, top in zip(histograms, each, strict=True)),
        best_set_coverage=tuple(round(set_coverage(h, best_set(h, width)), 6) for h in histograms),
        entropy_bits=tuple(round(entropy_bits(h), 4) for h in histograms),
    )


def _load(options: Options) -> LoadedModel:
    return load_model(
        options.model,
        device=options.device,
        dtype="auto",
        kv_dtype=options.dtype,
        page_size=PAGE_SIZE,
        load_format="safetensors",
        packed=PackedWeights(),
    )


def _read(options: Options) -> list[list[int]]:
    """Token ids of each text, no more than its share."""
    share = options.tokens // len(options.texts)
    contents = [_read_text(path, share * CHARACTERS_PER_TOKEN) for path in options.texts]
    tokenizer = load_tokenizer(options.model)
    texts = [tokenizer.encode(content, add_special_tokens=True)[:share] for content in contents]
    found = sum(map(len, texts))
    if found < MIN_TOKENS:
        raise ConfigError(f"--text: the files give {found} tokens; give at least {MIN_TOKENS}, in longer or more files")
    return texts


def _read_text(path: Path, characters: int) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(characters)
    except OSError as error:
        raise ConfigError(f"--text {path}: {error.strerror}; name a readable text file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--text {path} is not UTF-8; name a text file") from None
