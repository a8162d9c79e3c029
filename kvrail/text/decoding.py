"""The bytes that a token stands for, read from the `decoder` section of tokenizer.json.

Decoder-only models use one of two families: byte-level BPE (GPT-2, Llama 3, Qwen), where each character of a token
stands for one byte, and SentencePiece (Llama 2, Mistral, Gemma), where "▁" stands for a space and bytes without a token
of their own are written `<0xE2>`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvrail.errors import ConfigError

METASPACE = "▁"


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each of the 256 bytes, inverted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def fallback_byte(token: str) -> int | None:
    """Return the byte of a token such as `<0xE2>`; None for any other token."""
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    try:
        return int(token[3:5], 16)
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class TokenDecoder:
    """How one tokenizer's tokens become bytes.

    to_bytes: token -> the bytes it stands for, not at the start of a text.
    first_to_bytes: the same for the first token of a text, where a tokenizer treats it apart.
    strip: how many leading spaces of a whole text are taken off.
    per_byte: whether a malformed character is replaced byte by byte (SentencePiece) or once for each maximal
        malformed part (byte-level).
    """

    to_bytes: Callable[[str], bytes]
    first_to_bytes: Callable[[str], bytes]
    strip: int
    per_byte: bool


def read_decoder(section: dict[str, Any] | None) -> TokenDecoder:
    """Return what tokenizer.json's `decoder` section describes; ConfigError if it is of no known family."""
    steps = _flatten(section)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level()
    if kinds == ["Metaspace"]:
        return _metaspace(steps[0])
    if "Fuse" in kinds or "ByteFallback" in kinds:
        return _sentencepiece(steps)
    raise ConfigError(
        f"tokenizer.json: decoder {kinds or None} is not supported; convert the tokenizer to ByteLevel or to "
        "Replace, ByteFallback, Fuse, Strip"
    )


def _flatten(section: dict[str, Any] | None) -> list[dict[str, Any]]:
    if section is None:
        return []
    if section["type"] == "Sequence":
        return [step for inner in section["decoders"] for step in _flatten(inner)]
    return [section]


def _byte_level() -> TokenDecoder:
    alphabet = byte_alphabet()

    def to_bytes(token: str) -> bytes:
        # A token with a character outside the alphabet (an added token) stands for itself.
        if all(char in alphabet for char in token):
            return bytes(alphabet[char] for char in token)
        return token.encode()

    return TokenDecoder(to_bytes, to_bytes, strip=0, per_byte=False)


def _metaspace(step: dict[str, Any]) -> TokenDecoder:
    replacement = step.get("replacement", METASPACE)
    prepended = step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space", True)

    def to_bytes(token: str) -> bytes:
        return token.replace(replacement, " ").encode()

    def first_to_bytes(token: str) -> bytes:
        return token.replace(replacement, "").encode()

    return TokenDecoder(to_bytes, first_to_bytes if prepended else to_bytes, strip=0, per_byte=False)


def _sentencepiece(steps: list[dict[str, Any]]) -> TokenDecoder:
    replacements: list[tuple[str, str]] = []
    strip, fallback, fused = 0, False, False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if not (fallback or fused):
                replacements.append((old, new))
            case {"type": "ByteFallback"} if not fused:
                fallback = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if fused:
                strip += start
            case _:
                raise ConfigError(
                    f"tokenizer.json: decoder step {step} is not supported at its place; the supported order is "
                    "Replace, ByteFallback, Fuse, Strip"
                )

    def to_bytes(token: str) -> bytes:
        for old, new in replacements:
            token = token.replace(old, new)
        byte = fallback_byte(token) if fallback else None
        return token.encode() if byte is None else bytes([byte])

    return TokenDecoder(to_bytes, to_bytes, strip, per_byte=fallback)
