"""What `kvrail calibrate` is asked for; free of torch, so that the command line can check it first."""

from dataclasses import dataclass
from pathlib import Path

from kvrail.errors import ConfigError

MIN_TOKENS = 1024
"""Fewer tell too little of exponents that are rare."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asks for.

    texts: UTF-8 files. tokens: at most this many are measured, an equal share of each text. dtype: element type of the
    KV pages. shared: one window for all layers, else one a layer. out: a file that may be written.
    """

    model: str
    texts: tuple[Path, ...]
    out: Path
    tokens: int
    dtype: str
    device: str
    shared: bool

    def check(self) -> None:
        """Raise ConfigError where too few tokens are asked for."""
        if self.tokens < MIN_TOKENS:
            raise ConfigError(f"--tokens is {self.tokens}; ask for at least {MIN_TOKENS}")
