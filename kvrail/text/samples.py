"""Files of text as token ids, for tools that measure a model on a user's own text."""

from collections.abc import Sequence
from pathlib import Path

from kvrail.errors import ConfigError
from kvrail.text.tokenizer import load_tokenizer

_CHARACTERS_PER_TOKEN = 32
"""No text has longer tokens on average: of a file, no more is read than this many for each token that is wanted."""


def read_samples(model: str, paths: Sequence[Path], tokens: int) -> list[list[int]]:
    """The first `tokens` token ids of each of `paths`, UTF-8; model: a local folder or a Hub name, for its tokenizer.

    Raises ConfigError where a file cannot be read or is not UTF-8, or the model has no tokenizer.
    """
    contents = [_read(path, tokens * _CHARACTERS_PER_TOKEN) for path in paths]
    tokenizer = load_tokenizer(model)
    return [tokenizer.encode(content, add_special_tokens=True)[:tokens] for content in contents]


def _read(path: Path, characters: int) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(characters)
    except OSError as error:
        raise ConfigError(f"--text {path}: {error.strerror}; name a readable text file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--text {path} is not UTF-8; name a text file") from None
