"""Runs `kvrail quality`: contexts through the model and what is measured, table and JSON out."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from kvrail.codec import registry
from kvrail.engine.kv.closed.forms import CODE_BITS, unsupported
from kvrail.engine.model.loader import load_model
from kvrail.errors import ConfigError
from kvrail.text.samples import read_samples
from kvrail.tools.quality.lossy import AtRest, Lossy, OnTheWire
from kvrail.tools.quality.measure import measure
from kvrail.tools.quality.options import PAGE_SIZE, Options
from kvrail.tools.quality.report import record, report
from kvrail.values.layout import KVLayout
from kvrail.worker.packed.weights import PackedWeights


def run(options: Options) -> int:
    """Measure; returns the exit status. Raises ConfigError or UnsupportedModelError, with nothing written."""
    codecs = _codecs(options)
    share = -(-options.contexts // len(options.texts))
    windows = windows_of(read_samples(options.model, options.texts, share * options.length), options)
    loaded = load_model(
        options.model,
        device=options.device,
        dtype="auto",
        kv_dtype=options.dtype,
        page_size=PAGE_SIZE,
        load_format="safetensors",
        packed=PackedWeights(),
    )
    if options.length > loaded.max_model_len:
        raise ConfigError(
            f"--context-tokens: {options.length} tokens are beyond the model's context of {loaded.max_model_len};"
            " ask for fewer"
        )
    measured = measure(loaded, windows, options.context_tokens, [*codecs, *_forms(options, loaded.layout)])
    model = Path(options.model).name
    asked = {"context_tokens": options.context_tokens, "next_tokens": options.next_tokens}
    sys.stdout.write(report(measured, model, options.dtype, **asked))
    if options.json is not None:
        texts = [path.name for path in options.texts]
        found = record(measured, model, loaded.fingerprint, texts, kv_dtype=options.dtype, **asked)
        _write(options.json, json.dumps(found, indent=1) + "\n")
    return 0


def windows_of(texts: Sequence[Sequence[int]], options: Options) -> list[list[int]]:
    """Token ids of contexts and what follows, one after the other from the start of each text.

    Raises ConfigError where no text is long enough.
    """
    length = options.length
    found = [list(text[at : at + length]) for text in texts for at in range(0, len(text) - length + 1, length)]
    if not found:
        raise ConfigError(
            f"--text: no file has {length} tokens; name a longer one, or ask for fewer by --context-tokens"
        )
    return found[: options.contexts]


def _codecs(options: Options) -> list[Lossy]:
    codecs = [registry.get(name) for name in options.codecs]
    for codec in codecs:
        if options.dtype not in codec.dtypes:
            taken = ", ".join(sorted(codec.dtypes))
            raise ConfigError(f"--codecs: {codec.name} does not take {options.dtype} pages; it takes {taken}")
    return [OnTheWire(codec) for codec in codecs]


def _forms(options: Options, layout: KVLayout) -> list[Lossy]:
    """Raises ConfigError where the model's pages have no such form."""
    for name in options.forms:
        if name in CODE_BITS and (why := unsupported(layout, CODE_BITS[name])):
            raise ConfigError(f"--kv-cache: {why}")
    return [AtRest(name, layout) for name in options.forms]


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {path}: {error.strerror}") from None
