"""A packed folder, unpacked: the very files that it was made of."""

from pathlib import Path

from kvrail.engine.model.header import Tensor, shown
from kvrail.errors import ConfigError, KvrailError
from kvrail.tools.pack.journal import Journal, Written, complete, copy_files, other_files, work_on
from kvrail.tools.pack.packing import Advance, Sizes, check_model, identity_of
from kvrail.worker.packed.file import SUFFIX, Bytes, PackedFile, digest
from kvrail.worker.packed.source import WEIGHTS, BaseFolder, SourceFile


def unpack(packed: Path, out: Path, base: Path | None, *, verify: bool, advance: Advance) -> Sizes:
    """Unpack the folder `packed` into the new folder `out`.

    base: the folder that deltas were made against. verify: read each file again and compare it with the digests that
    were taken when it was packed. Raises ConfigError that names file and tensor where something is damaged or the base
    is another one, KvrailError where verifying fails.
    """
    files = check_model(packed, out, WEIGHTS + SUFFIX, "name a folder that kvrail pack made")
    others = other_files(packed, set(files))
    taken_off = None if base is None else BaseFolder(base)
    for path in files:
        with PackedFile(path) as file:
            for place, tensor in enumerate(file.header.tensors):
                _base_of(file, place, tensor, taken_off)
    with work_on(out, identity_of("unpack", files, base)) as journal:
        if journal is not None:
            for path in files:
                with PackedFile(path) as file:
                    _unpack_file(file, taken_off, journal, verify=verify, advance=advance)
            copy_files(packed, journal.folder, others)
    plain = sum((out / path.name.removesuffix(SUFFIX)).stat().st_size for path in files)
    return Sizes(plain, sum(path.stat().st_size for path in files))


def _unpack_file(
    packed: PackedFile, base: BaseFolder | None, journal: Journal, *, verify: bool, advance: Advance
) -> None:
    tensors = packed.header.tensors
    expected = [
        Written(tensor.begin, tensor.end - tensor.begin, part.raw_digest)
        for tensor, part in zip(tensors, packed.parts, strict=True)
    ]
    file, written = journal.resume(
        packed.name, packed.header.raw, lambda place, part: expected[place : place + 1] == [part]
    )
    with file:
        advance(sum(part.size for part in written))
        for place in range(len(written), len(tensors)):
            raw = packed.memory(expected[place].size)
            packed.decode(place, raw, base=_base_of(packed, place, tensors[place], base))
            file.write(raw.data)
            journal.add(packed.name, file, expected[place])
            advance(raw.size)
        complete(file)
    if verify:
        _verify(journal.folder / packed.name, packed)


def _base_of(packed: PackedFile, place: int, tensor: Tensor, base: BaseFolder | None) -> Bytes | None:
    """The bytes that a delta was made against, or None where the tensor is no delta."""
    if packed.base is None or not packed.is_delta(place):
        return None
    if base is None:
        raise ConfigError(f"{packed.path} has deltas against {shown(packed.base.folder)}; give that folder as --base")
    found = base.like(tensor)
    if found is None:
        raise ConfigError(
            f"--base {base.folder} has no tensor like {shown(tensor.name)} of {packed.path}; give the right one"
        )
    return found


def _verify(path: Path, packed: PackedFile) -> None:
    source = SourceFile(path)
    if source.header != packed.header:
        raise KvrailError(f"the header of {path} is not what was packed; check memory and disk")
    for tensor, part in zip(source.header.tensors, packed.parts, strict=True):
        if digest(source.bytes_of(tensor).data) != part.raw_digest:
            raise KvrailError(f"tensor {shown(tensor.name)} of {path} is not what was packed; check memory and disk")
