"""Chat turns from manual pages: what a command is, its synopsis and its options."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import phrases
from corpus import Document
from phrases import ask, first_sentences, sentence

THINGS = {
    "1": "command", "8": "system administration command", "2": "system call",
    "3": "library function", "4": "device file", "5": "file format", "6": "game",
    "7": "manual topic",
}  # fmt: skip
CORE = frozenset(
    (
        "coreutils", "util-linux", "bsdutils", "mount", "bsdextrautils", "grep", "sed",
        "gawk", "findutils", "diffutils", "patch", "tar", "gzip", "bzip2", "xz-utils", "zstd",
        "zip", "unzip", "cpio", "rsync", "curl", "wget", "procps", "psmisc", "bash", "dash",
        "less", "nano", "vim-common", "ed", "file", "tree", "jq", "bc", "make", "git-man",
        "openssh-client", "openssh-server", "systemd", "cron", "at", "iproute2",
        "iputils-ping", "net-tools", "kmod", "udev", "sudo", "passwd", "login", "adduser",
        "acl", "e2fsprogs", "fdisk", "parted", "lsof", "strace", "tcpdump", "nmap", "man-db",
        "dpkg-dev", "debhelper", "gnupg", "gpg", "openssl", "screen", "tmux",
        "binutils-common", "gcc-12", "gdb", "perl", "python3.11-minimal", "sqlite3",
        "postgresql-client-15", "apache2-bin", "docker.io", "podman", "nftables", "iptables",
        "manpages", "logrotate", "rsyslog", "lvm2", "mdadm", "cryptsetup-bin", "redis-tools",
        "mariadb-client", "dnsmasq-base", "btrfs-progs", "fuse3", "quota", "tidy", "pandoc",
        "graphviz",
    )
)  # fmt: skip
NAME_LINE = re.compile(r"^NAME\n +(\S.*?)\n\n", re.S)
SECTION = re.compile(r"^([A-Z][A-Z ,]+)\n", re.M)
OPTION = re.compile(r"^ {4}(-{1,2}\w[^\n]{0,60})(?:\n {8,12}|  +)(\S[^\n]*(?:\n {8,12}\S[^\n]*)*)", re.M)
Turns = list[tuple[str, str]]


def sections(text: str) -> dict[str, str]:
    """The top-level sections of a rendered manual page."""
    pieces = SECTION.split("\n" + text)
    return dict(zip(pieces[1::2], pieces[2::2], strict=False))


def paragraphs(section: str) -> list[str]:
    """The prose paragraphs of a section, their lines joined."""
    found = []
    for block in section.split("\n\n"):
        lines = block.strip("\n").split("\n")
        if len({len(x) - len(x.lstrip()) for x in lines}) == 1:
            found.append(" ".join(line.strip() for line in lines))
    return [p for p in found if (len(p) > 60 and p[:1].isupper()) or p[:1].islower()]


class Page:
    """One manual page, taken apart."""

    def __init__(self, document: Document) -> None:
        self.text = document["text"]
        self.section = re.sub(r"\.gz$", "", document["name"]).rsplit(".", 1)[-1][:1]
        self.core = document["source"] in CORE
        match = NAME_LINE.match(self.text)
        line = " ".join(match.group(1).split()) if match else ""
        names, _, self.what = re.sub(r" (—|–|-{1,2}) ", "\0", line, count=1).partition("\0")
        self.names = [n.strip() for n in names.split(",") if n.strip()]
        self.parts = sections(self.text)
        self.thing = THINGS.get(self.section, "manual topic")

    @property
    def usable(self) -> bool:
        """Whether the NAME line could be read."""
        return bool(self.names) and len(self.names[0]) < 40 and 4 < len(self.what) < 160

    def define(self, name: str, chance: random.Random) -> str:
        """The NAME line as a sentence, at times with the start of the description."""
        if self.section == "7" and not name.islower():
            head = f"{name} is a manual topic: {self.what.rstrip('.')}."
        else:
            head = sentence(name, self.what, self.thing)
        prose = paragraphs(self.parts.get("DESCRIPTION", ""))
        extra = first_sentences(prose[0], chance.choice((0, 1, 1, 2)), 380) if prose else ""
        return f"{head} {extra}".strip()

    def synopsis(self) -> str:
        """The SYNOPSIS section as a block of code."""
        lines = [x.strip() for x in self.parts.get("SYNOPSIS", "").strip().split("\n")]
        body = "\n".join(lines[:8]).strip()
        return f"```\n{body}\n```" if 3 < len(body) < 500 else ""

    def options(self) -> list[tuple[str, str]]:
        """The options with the first sentences of what they do."""
        found = []
        for match in OPTION.finditer(self.text):
            flags = match.group(1).strip().rstrip(",")
            meaning = first_sentences(match.group(2), 2, 300)
            short = re.split(r"[ ,=\[<]", flags)[0]
            if meaning and len(meaning) > 15 and len(short) > 1:
                found.append((flags, meaning))
        return found


def core_names(corpus: list[Document]) -> set[str]:
    """The commands of the core packages."""
    pages = [Page(d) for d in corpus if d["kind"] == "man" and d["source"] in CORE]
    return {name for page in pages for name in page.names if page.section in "18"}


def option_answer(flags: str, meaning: str, name: str) -> str:
    """An option's meaning as an answer."""
    return f"`{flags}`: {meaning}" if len(meaning) % 2 else f"In {name}, `{flags}` means: {meaning}"


def page_turns(page: Page, chance: random.Random) -> Iterator[tuple[str, Turns]]:
    """All conversations about one page."""
    name = page.names[0]
    forms = phrases.COMMAND if page.section in "18" else phrases.WHAT_DOES
    copies = 8 if page.core and page.section in "18" else 2 if page.core else 1
    for number in range(copies):
        asked = chance.choice(page.names[:3]) if number > 2 else name
        form = forms[:1] if number == 0 else ("What is {x}?",) if number == 1 else forms
        yield name, [(ask(chance, form, x=asked), page.define(asked, chance))]
    synopsis, options = page.synopsis(), page.options()
    if synopsis and (page.core or chance.random() < 0.3):
        yield name, [(ask(chance, phrases.USAGE, x=name), synopsis)]
        turns = [(ask(chance, forms, x=name), page.define(name, chance)),
                 (ask(chance, phrases.USAGE_NEXT), synopsis)]  # fmt: skip
        if options:
            flags, meaning = chance.choice(options)
            short = re.split(r"[ ,=\[<]", flags)[0]
            turns.append((ask(chance, phrases.OPTION_NEXT, o=short),
                          option_answer(flags, meaning, name)))  # fmt: skip
        yield name, turns
    few = options if page.core else chance.sample(options, min(2, len(options)))
    for flags, meaning in few[:40]:
        short = chance.choice(re.findall(r"-{1,2}\w[\w-]*", flags) or [flags])
        question = ask(chance, phrases.OPTION, x=name, o=short)
        yield name, [(question, option_answer(flags, meaning, name))]
    prose = paragraphs(page.parts.get("DESCRIPTION", ""))
    long = "\n\n".join(prose[:6])[:2200].rpartition(".")[0] + "."
    if len(long) > 500 and (page.core or chance.random() < 0.3):
        yield name, [(ask(chance, phrases.LONG, x=name), long)]
        yield name, [(ask(chance, forms, x=name), page.define(name, chance)),
                     (ask(chance, phrases.MORE), long)]  # fmt: skip
    if chance.random() < 0.35 and len(page.text) > 800:
        shown = page.text[page.text.find("SYNOPSIS") :][: chance.choice((1500, 3000, 6000))]
        yield name, [(ask(chance, phrases.READ_PAGE, x=shown),
                      sentence(name, page.what, page.thing))]  # fmt: skip


def turns(corpus: list[Document], chance: random.Random) -> Iterator[tuple[str, Turns]]:
    """Conversations about every manual page of the training part."""
    for document in corpus:
        if document["kind"] == "man" and not document["heldout"]:
            page = Page(document)
            if page.usable and not (page.section == "3" and chance.random() < 0.6):
                yield from page_turns(page, chance)
