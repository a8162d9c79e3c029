"""How much text a token can stand for, so that a text that is too long is refused without being encoded."""

import json
from collections.abc import Mapping
from typing import Any

import tokenizers

NFC_FACTOR = 4
"""Characters at most that Unicode's composition makes one, as in U+1F82."""


def longest_text(backend: tokenizers.Tokenizer, model: Mapping[str, Any]) -> int | None:
    """Characters of text that one token stands for at most; None where there is no bound.

    model: the section of that name in tokenizer.json. There is no bound where whitespace or unknown characters in any
    number may become one token or none.
    """
    if model.get("type") != "BPE" or _fuses_unknown(model):
        return None
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return None
    shrinks = 1 if backend.normalizer is None else _shrinks(json.loads(backend.normalizer.__getstate__()))
    return shrinks and shrinks * max(map(len, backend.get_vocab(with_added_tokens=True)))


def _fuses_unknown(model: Mapping[str, Any]) -> bool:
    return model.get("unk_token") is not None and bool(model.get("fuse_unk")) and not model.get("byte_fallback")


def _shrinks(normalizer: Mapping[str, Any]) -> int | None:
    """How many characters a normalizer makes one at most; None: it is not known."""
    kind, pattern = normalizer["type"], normalizer.get("pattern", {}).get("String")
    if kind == "Sequence":
        each = [_shrinks(part) for part in normalizer["normalizers"]]
        return None if None in each else max((part for part in each if part), default=1)
    if kind == "Prepend" or (kind == "Replace" and pattern and len(normalizer["content"]) >= len(pattern)):
        return 1
    return NFC_FACTOR if kind == "NFC" else None
