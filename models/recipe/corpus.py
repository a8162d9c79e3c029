"""Build the training text: fetch packages, extract, filter, deduplicate, hold some out.

    python3 corpus.py --work SCRATCH_FOLDER

writes SCRATCH_FOLDER/corpus.jsonl, one document a line, and sources.txt here.
Needs apt and dpkg (a Debian machine), mandoc, and the Python package lxml.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from multiprocessing import Pool
from pathlib import Path
from typing import Any

import extract
import sources

HERE = Path(__file__).resolve().parent
HELD_OUT_SHARE = 0.012
FILE_CAP = 250_000
PACKAGE_CAPS = {
    "python3.11-doc": 20_000_000, "libpython3.11-stdlib": 20_000_000,
    "libpython3.11-minimal": 5_000_000, "linux-doc-6.1": 11_000_000,
    "postgresql-doc-15": 10_000_000, "manpages": 6_000_000, "manpages-dev": 6_000_000,
    "perl-doc": 4_000_000, "git-doc": 6_000_000, "git-man": 5_000_000, "rust-doc": 4_000_000,
    "python-django-doc": 6_000_000, "vim-runtime": 4_000_000, "sqlite3-doc": 6_000_000,
    "debian-handbook": 5_000_000, "dict-foldoc": 8_000_000, "python-sqlalchemy-doc": 3_500_000,
    "systemd": 5_000_000, "util-linux": 5_000_000, "coreutils": 5_000_000,
    "python3-django": 1_500_000, "python3-numpy": 1_500_000, "python3-requests": 1_500_000,
    "debian-reference-en": 4_000_000, "apache2-doc": 4_000_000,
}  # fmt: skip


def package_cap(name: str) -> int:
    """The most characters to take from a package not named above."""
    if name in PACKAGE_CAPS:
        return PACKAGE_CAPS[name]
    if "-doc" in name:
        return 1_800_000
    return 550_000 if name.startswith("python3-") else 1_200_000


SKIPPED_PATHS = re.compile(
    r"/(_modules|_sources|_static|_images|locale|tests?|testing|i18n|changelogs?|genindex|"
    r"copyright|search|po|__pycache__|lib2to3/tests|idle_test|encodings|news|NEWS|releases?)"
    r"(/|\.|$)|/changelog|genindex|py-modindex|whatsnew/changelog|test_\w+\.py$|_pb2\.py$|"
    r"(?i:hierarchy|functions_|globals_|annotated|classes\.html|index-all|all-classes)|"
    r"[./_-](de|fr|es|it|pt|pt-br|pt_BR|ru|ja|ko|zh|zh_CN|zh-cn|nl|pl|cs|da|sv|fi|hu|tr|uk|el|ca|"
    r"vi|nb|nn|ro|sk|eu|id|ar|he|"
    r"no|sr|bg|lt|et|lv|sl|hr|gl|th|fa|bn|hi|ta|ml|mr)(-[A-Za-z]{2,4}|_[A-Z]{2})?(\.html|\.txt|/|\.utf8|\.gz)"
)
STOP_WORDS = frozenset(
    (
        "the", "of", "and", "to", "in", "is", "a", "that", "for", "it", "this", "with", "as",
        "be", "on", "or", "are", "by", "not",
    )
)  # fmt: skip
WORD = re.compile(r"[A-Za-z]+")
DIGITS = re.compile(r"\d+")
Document = dict[str, Any]


def fraction(key: str) -> float:
    """A number in [0, 1) that depends on the key alone."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:6], "big") / 2**48


def good(text: str, kind: str) -> bool:
    """Whether a text reads like English prose or like code, rather than data."""
    if len(text) < 300:
        return False
    sample = text[:20_000]
    plain = sum(c.isascii() for c in sample) / len(sample)
    letters = sum(c.isalpha() or c == " " for c in sample) / len(sample)
    if plain < 0.97 or letters < (0.5 if kind in {"python", "perl", "shell"} else 0.62):
        return False
    if max(len(line) for line in sample.split("\n")) > 3000:
        return False
    words = [w.lower() for w in WORD.findall(sample)]
    if kind in {"python", "perl", "shell"}:
        return len(set(words)) > 0.04 * len(words)
    common = sum(w in STOP_WORDS for w in words)
    articles = sum(w in {"the", "and", "of"} for w in words)
    return common > 0.12 * len(words) and articles > 0.03 * len(words)


def package_documents(folder: Path, name: str) -> list[Document]:
    """The texts of one unpacked package, in an order fixed by hash, up to its cap."""
    files = [p for p in folder.rglob("*") if p.is_file() and not p.is_symlink()]
    chosen = [(p, extract.kind_of(p)) for p in files]
    names = {p: p.relative_to(folder).as_posix() for p, kind in chosen if kind}
    documents: list[Document] = []
    room = package_cap(name)
    for path, kind in sorted(chosen, key=lambda item: fraction(names.get(item[0], ""))):
        if kind is None or room <= 0 or SKIPPED_PATHS.search("/" + names[path]):
            continue
        if name == "git-doc" and kind == "text":  # the same as its HTML pages
            continue
        if kind == "perl" and name not in {"perl-base", "perl-modules-5.36"}:
            continue
        text = extract.file_text(path, kind)[:FILE_CAP].strip()
        if good(text, kind):
            room -= len(text)
            documents.append({"source": name, "kind": kind, "name": names[path], "text": text})
    return documents


def dictionary_documents(folder: Path, name: str) -> list[Document]:
    """The entries of a dict package, joined to documents of some 20 KB."""
    documents: list[Document] = []
    for path in folder.glob("usr/share/dictd/*.dict.dz"):
        text = extract.read_text(path)
        entries = re.split(r"\n(?=\S)", text)
        lump: list[str] = []
        for entry in [*entries[20:], ""]:
            lump.append(re.sub(r"[{}]", "", entry).strip())
            if sum(map(len, lump)) > 20_000 or entry == "":
                number = len(documents)
                documents.append({"source": name, "kind": "dictionary",
                                  "name": f"{number}", "text": "\n\n".join(lump)})  # fmt: skip
                lump = []
    return documents


def one_package(job: tuple[Path, Path]) -> tuple[sources.Package, list[Document]]:
    """Unpack one archive and read its documents."""
    archive, root = job
    folder = sources.unpack(archive, root)
    package = sources.describe(archive, folder)
    if package.name.startswith("dict-"):
        return package, dictionary_documents(folder, package.name)
    return package, package_documents(folder, package.name)


class Deduplicator:
    """Drops paragraphs that an earlier document already had, digits and spacing aside."""

    def __init__(self) -> None:
        self.seen: set[bytes] = set()
        self.dropped = 0

    def __call__(self, text: str) -> str:
        """The text without its repeated paragraphs; empty where little is left."""
        kept: list[str] = []
        for paragraph in text.split("\n\n"):
            if len(paragraph) >= 50:
                norm = " ".join(DIGITS.sub("0", paragraph).lower().split())
                digest = hashlib.blake2b(norm.encode(), digest_size=10).digest()
                if digest in self.seen:
                    self.dropped += len(paragraph)
                    continue
                self.seen.add(digest)
            kept.append(paragraph)
        result = "\n\n".join(kept)
        return result if len(result) > max(250, 0.3 * len(text)) else ""


def documents(work: Path) -> Iterator[tuple[sources.Package, list[Document]]]:
    """Every package with its documents, read by all cores."""
    archives = sorted((work / "debs").glob("*.deb"), key=lambda p: fraction(p.name))
    with Pool() as pool:
        yield from pool.imap(one_package, [(a, work / "root") for a in archives])


def main() -> None:
    """Build the corpus."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="a scratch folder")
    parser.add_argument("--no-download", action="store_true", help="take SCRATCH/debs as it is")
    args = parser.parse_args()
    if not args.no_download:
        sources.download(sources.wanted(HERE / "packages.txt"), args.work / "debs")
    unique, rows = Deduplicator(), []
    kinds: Counter[str] = Counter()
    with (args.work / "corpus.jsonl").open("w") as out:
        for package, found in documents(args.work):
            size = 0
            for document in found:
                document["text"] = unique(document["text"])
                if not document["text"]:
                    continue
                key = f"{document['source']}/{document['name']}"
                document["heldout"] = fraction("held out " + key) < HELD_OUT_SHARE
                size += len(document["text"].encode())
                kinds[document["kind"]] += len(document["text"])
                out.write(json.dumps(document, ensure_ascii=False) + "\n")
            if size:
                rows.append(f"{package.name}\t{package.version}\t{size}\t{package.licences}")
    header = "# package\tversion\tbytes of text used\tlicences its copyright file names\n"
    (HERE / "sources.txt").write_text(header + "\n".join(sorted(rows)) + "\n")
    print(f"repeated text dropped: {unique.dropped / 1e6:.1f} MB")
    for kind, count in kinds.most_common():
        print(f"{kind:12} {count / 1e6:8.1f} MB")


if __name__ == "__main__":
    main()
