"""A model's folder, packed: tensor by tensor, each on all threads."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from kvrail.engine.model.header import CODED_AS, Tensor
from kvrail.errors import ConfigError, KvrailError
from kvrail.tools.pack.journal import Journal, Written, complete, copy_files, other_files, work_on
from kvrail.worker.packed.file import CODEC, MAGIC, SUFFIX, Base, Bytes, PackedFile, Part, digest, write_index
from kvrail.worker.packed.source import WEIGHTS, BaseFolder, SourceFile

Advance = Callable[[int], object]
"""Called with the bytes of weights that are done."""

DELTA_SHARE = 0.6
"""Share of a tensor from which on its delta is compared with its own code: bases are worth it below."""
_NOTES = 2
"""What the journal says of a packed tensor beside its place: the digest of its bytes, and whether it is a delta."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What became of a model's weight files, in bytes."""

    plain: int
    packed: int


def check_model(folder: Path, out: Path, pattern: str, remedy: str) -> list[Path]:
    """The weight files of a model's folder. Raises ConfigError where it is none, or `out` lies within it."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; name a folder that has a model")
    if out.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"OUT {out} lies within {folder}; name a folder elsewhere")
    files = sorted(folder.glob(pattern))
    if not files or not (folder / "config.json").is_file():
        missing = "config.json" if files else f"files {pattern}"
        raise ConfigError(f"{folder} has no {missing}; {remedy}")
    for path in files:
        name = path.name.removesuffix(SUFFIX) if path.name.endswith(SUFFIX) else f"{path.name}{SUFFIX}"
        if path.with_name(name).exists():
            raise ConfigError(f"{folder} has both {path.name} and {name}; delete one of them")
    return files


def identity_of(command: str, files: list[Path], base: Path | None) -> dict[str, object]:
    """What identifies a job: its files and those of its base, by path, size and time of change."""
    known = files if base is None else [*files, *sorted(base.glob(WEIGHTS))]
    weights = [[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in known]
    return {"command": command, "version": 1, "weights": weights, "base": base and str(base.resolve())}


def pack(model: Path, out: Path, base: Path | None, *, verify: bool, advance: Advance) -> Sizes:
    """Pack the folder `model` into the new folder `out`.

    base: a folder of a model of the same tensors; what differs is coded. verify: read each file again and compare it
    with what it was made of. Raises ConfigError for what cannot be packed, KvrailError where verifying fails.
    """
    files = check_model(model, out, WEIGHTS, "name the folder of a model in safetensors files")
    others = other_files(model, set(files))
    taken_off = None if base is None else BaseFolder(base)
    with work_on(out, identity_of("pack", files, base)) as journal:
        if journal is not None:
            for path in files:
                _pack_file(SourceFile(path), taken_off, journal, verify=verify, advance=advance)
            copy_files(model, journal.folder, others)
    packed = sum((out / f"{path.name}{SUFFIX}").stat().st_size for path in files)
    return Sizes(sum(path.stat().st_size for path in files), packed)


def _pack_file(
    source: SourceFile, base: BaseFolder | None, journal: Journal, *, verify: bool, advance: Advance
) -> None:
    name, tensors = f"{source.path.name}{SUFFIX}", source.header.tensors
    file, written = journal.resume(name, MAGIC, lambda place, part: place < len(tensors) and len(part.note) == _NOTES)
    with file:
        advance(sum(tensor.end - tensor.begin for tensor in tensors[: len(written)]))
        for tensor in tensors[len(written) :]:
            written.append(_pack_tensor(source, tensor, base, file))
            journal.add(name, file, written[-1])
            advance(tensor.end - tensor.begin)
        parts = [Part(part.offset, part.size, part.note[0]) for part in written]
        deltas = None if base is None else Base(str(base.folder), tuple(bool(part.note[1]) for part in written))
        file.write(write_index(source.header, parts, deltas))
        complete(file)
    if verify:
        _verify(journal.folder / name, source, base)


def _pack_tensor(source: SourceFile, tensor: Tensor, base: BaseFolder | None, file: BinaryIO) -> Written:
    raw = source.bytes_of(tensor)
    coded, is_delta = _smallest(raw, tensor, None if base is None else base.like(tensor))
    offset = file.tell()
    file.write(coded)
    return Written(offset, len(coded), digest(coded), (digest(raw.data), int(is_delta)))


def _smallest(raw: Bytes, tensor: Tensor, base: Bytes | None) -> tuple[memoryview, bool]:
    """The tensor's container, and whether it is a delta."""
    dtype = CODED_AS.get(tensor.dtype, "uint8")
    if base is None:
        return CODEC.encode_bytes(raw, dtype), False
    delta = CODEC.encode_bytes(raw, dtype, base=base)
    if len(delta) < DELTA_SHARE * raw.size:
        return delta, True
    alone = CODEC.encode_bytes(raw, dtype)
    return (delta, True) if len(delta) < len(alone) else (alone, False)


def _verify(path: Path, source: SourceFile, base: BaseFolder | None) -> None:
    with PackedFile(path) as packed:
        for place, tensor in enumerate(packed.header.tensors):
            out = np.empty(tensor.end - tensor.begin, np.uint8)
            packed.decode(place, out, base=base.like(tensor) if base is not None and packed.is_delta(place) else None)
            if not np.array_equal(out, source.bytes_of(tensor)):
                raise KvrailError(f"tensor {tensor.name!r} of {path} is not what was packed; check memory and disk")
