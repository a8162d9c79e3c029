"""Tensors to self-describing bytes and back. Knows no network and no model; imports nothing of ours.

`encode` and `decode` take tensors. `names` and `get` are of codecs of KV pages (registry.py). Importing this costs
nothing: torch and kernels come with the first call.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from kvrail.codec.base import Codec, Payload
    from kvrail.codec.splitzip.one_stage.codebook import Codebook

__all__ = ["decode", "encode", "get", "names"]


def encode(tensor: "torch.Tensor", codec: str = "huffman", *, base: "torch.Tensor | None" = None) -> memoryview:
    """Self-describing bytes of `tensor`, any shape, read-only, from which `decode` restores every bit.

    codec: `huffman` is the one there is. base: a tensor of the same shape and type that is much like it, such as the
    checkpoint before: what differs is coded. Raises UnknownCodecError; CodecError for what the codec does not take.
    """
    from kvrail.codec.huffman.codec import HuffmanCodec
    from kvrail.codec.registry import UnknownCodecError

    if codec != HuffmanCodec.name:
        raise UnknownCodecError(f"tensor codec {codec!r} is unknown; choose {HuffmanCodec.name}")
    return HuffmanCodec().encode(tensor, base=base)


def decode(payload: "Payload", *, base: "torch.Tensor | None" = None) -> "torch.Tensor":
    """The tensor that `encode` was given, in host memory; `base` as there.

    Raises CodecError, which says what is wrong, where the bytes are not whole or the base is another one.
    """
    from kvrail.codec.huffman.codec import HuffmanCodec

    return HuffmanCodec().decode(payload, base=base)


def names() -> tuple[str, ...]:
    """Names of all codecs of KV pages that can be made here."""
    from kvrail.codec import registry

    return registry.names()


def get(name: str, codebook: "Codebook | None" = None) -> "Codec":
    """Make the codec of KV pages called `name`; raises UnknownCodecError, which lists the names there are."""
    from kvrail.codec import registry

    return registry.get(name, codebook)
