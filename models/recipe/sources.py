"""Fetch the Debian packages the corpus is made of, and record what they are."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

LICENCE_FIELD = re.compile(r"^License:\s*(\S[^\n]*)", re.M)


@dataclass(frozen=True)
class Package:
    """One package: its name, version and the licences its copyright file names."""

    name: str
    version: str
    licences: str


def wanted(listing: Path) -> list[str]:
    """The package names in packages.txt, in its order, each once."""
    names: dict[str, None] = {}
    for line in listing.read_text().splitlines():
        if not line.startswith("#"):
            names.update(dict.fromkeys(line.split()))
    return list(names)


def download(names: list[str], folder: Path) -> None:
    """Fetch the packages with apt, those missing from the release left out."""
    folder.mkdir(parents=True, exist_ok=True)
    known = subprocess.run(
        ["apt-cache", "show", "--no-all-versions", *names],
        capture_output=True, text=True, check=False,
    ).stdout  # fmt: skip
    present = re.findall(r"^Package: (\S+)", known, re.M)
    have = {path.name.split("_")[0] for path in folder.glob("*.deb")}
    missing = sorted(set(present) - have)
    for start in range(0, len(missing), 60):
        batch = missing[start : start + 60]
        subprocess.run(["apt-get", "download", "-q", *batch], cwd=folder, check=True)


def unpack(archive: Path, root: Path) -> Path:
    """Unpack one .deb below root, once, and return its folder."""
    target = root / archive.name.split("_")[0]
    if not target.exists():
        target.mkdir(parents=True)
        subprocess.run(["dpkg", "-x", str(archive), str(target)], check=True)
    return target


def licences_of(folder: Path, name: str) -> str:
    """The licence names of a package's machine-readable copyright file, shortest list first."""
    path = folder / "usr/share/doc" / name / "copyright"
    if path.parent.is_symlink():
        return f"as {path.parent.readlink().name}"
    if not path.is_file():
        return "see the source package"
    text = path.read_text(errors="replace")
    names = dict.fromkeys(m.strip().rstrip(".") for m in LICENCE_FIELD.findall(text))
    short = [n for n in names if len(n) < 40]
    if short:
        return ", ".join(short[:6]) + (", …" if len(short) > 6 else "")
    for label in ("GPL-3", "GPL-2", "LGPL", "GFDL", "Apache", "Artistic", "BSD", "MIT", "GPL"):
        if label in text or label.replace("GFDL", "Free Documentation") in text:
            return f"{label} (free-form copyright file)"
    return "free-form copyright file"


def describe(archive: Path, folder: Path) -> Package:
    """Name, version and licences of an unpacked package."""
    name, version = archive.name.split("_")[:2]
    return Package(name, version.replace("%3a", ":"), licences_of(folder, name))
