"""A packed folder, unpacked: the very files that it was made of."""

from pathlib import Path

import numpy as np

from kvrail.errors import ConfigError, KvrailError
from kvrail.services.pack.journal import Journal, Written, complete, copy_others, work_on
from kvrail.services.pack.packing import Advance, Sizes, check_model, identity_of
from kvrail.services.packed.file import SUFFIX, Bytes, PackedFile, digest
from kvrail.services.packed.header import Tensor
from kvrail.services.packed.source import WEIGHTS, BaseFolder, SourceFile


def unpack(packed: Path, out: Path, base: Path | None, *, verify: bool, advance: Advance) -> Sizes:
    """Unpack the folder `packed` into the new folder `out`.

    base: the folder that deltas were made against. verify: read each file again and compare it with the digests that
    were taken when it was packed. Raises ConfigError that names file and tensor where something is damaged or the base
    is another one, KvrailError where verifying fails.
    """
    files = check_model(packed, out, WEIGHTS + SUFFIX, "name a folder that kvrail pack made")
    taken_off = None if base is None else BaseFolder(base)
    with work_on(out, identity_of("unpack", files, base)) as journal:
        if journal is not None:
            for path in files:
                with PackedFile(path) as file:
                    _unpack_file(file, taken_off, journal, verify=verify, advance=advance)
            copy_others(packed, journal.folder, set(files))
    plain = sum((out / path.name.removesuffix(SUFFIX)).stat().st_size for path in files)
    return Sizes(plain, sum(path.stat().st_size for path in files))


def _unpack_file(
    packed: PackedFile, base: BaseFolder | None, journal: Journal, *, verify: bool, advance: Advance
) -> None:
    tensors, header = packed.header.tensors, packed.header.raw
    file, written = journal.resume(packed.name)
    with file:
        if not written:
            file.write(header)
        advance(sum(part.size for part in written))
        for place in range(len(written), len(tensors)):
            tensor, check = tensors[place], packed.parts[place].raw_digest
            raw = np.empty(tensor.end - tensor.begin, np.uint8)
            packed.decode(place, raw, base=_base_of(packed, place, tensor, base))
            if digest(raw.data) != check:
                raise packed.refused(tensor, "what it decodes to is not what was packed")
            file.write(raw.data)
            journal.add(packed.name, file, Written(tensor.begin, raw.size, check))
            advance(raw.size)
        complete(file)
    if verify:
        _verify(journal.folder / packed.name, packed)


def _base_of(packed: PackedFile, place: int, tensor: Tensor, base: BaseFolder | None) -> Bytes | None:
    """The bytes that a delta was made against, or None where the tensor is no delta."""
    if packed.base is None or not packed.base.delta[place]:
        return None
    if base is None:
        raise ConfigError(f"{packed.path} has deltas against {packed.base.folder}; give that folder as --base")
    found = base.like(tensor)
    if found is None:
        raise ConfigError(
            f"--base {base.folder} has no tensor like {tensor.name!r} of {packed.path}; give the right one"
        )
    return found


def _verify(path: Path, packed: PackedFile) -> None:
    source = SourceFile(path)
    if source.header != packed.header:
        raise KvrailError(f"the header of {path} is not what was packed; check memory and disk")
    for tensor, part in zip(source.header.tensors, packed.parts, strict=True):
        if digest(source.bytes_of(tensor).data) != part.raw_digest:
            raise KvrailError(f"tensor {tensor.name!r} of {path} is not what was packed; check memory and disk")
