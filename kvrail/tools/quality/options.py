"""What `kvrail quality` is asked for; free of torch, so that the command line can check it first."""

from dataclasses import dataclass
from pathlib import Path

from kvrail.errors import ConfigError
from kvrail.values.kv_cache import LOSSY_FORMS

PAGE_SIZE = 64
"""Tokens of a page, the workers' default."""
PAGE_FORMS = ("plain", *LOSSY_FORMS)
"""Forms of pages at rest."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asks for.

    texts: UTF-8 files. codecs, forms: names, all known; forms are of pages at rest. contexts: at most this many, of all
    texts together. context_tokens: tokens whose KV goes through a codec or a form; next_tokens: tokens after them that
    are judged. dtype: element type of the KV pages. json: a file that may be written, or None.
    """

    model: str
    texts: tuple[Path, ...]
    codecs: tuple[str, ...]
    forms: tuple[str, ...]
    contexts: int
    context_tokens: int
    next_tokens: int
    dtype: str
    device: str
    json: Path | None

    @property
    def length(self) -> int:
        """Tokens of a context, those after it, and the one that the last of these is to predict."""
        return self.context_tokens + self.next_tokens + 1

    def check(self) -> None:
        """Raise ConfigError where a number cannot be."""
        if self.contexts < 1:
            raise ConfigError(f"--contexts is {self.contexts}; ask for at least 1")
        if self.context_tokens < PAGE_SIZE or self.context_tokens % PAGE_SIZE:
            raise ConfigError(
                f"--context-tokens is {self.context_tokens}; ask for whole pages, a multiple of {PAGE_SIZE}"
            )
        if self.next_tokens < 1:
            raise ConfigError(f"--next-tokens is {self.next_tokens}; ask for at least 1")
