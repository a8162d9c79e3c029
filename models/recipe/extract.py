"""Turn the files of a Debian package into plain text.

Four shapes are understood: HTML pages, manual pages, GNU info files and text
that is readable as it stands (Python sources, reStructuredText, Markdown, POD).
"""

from __future__ import annotations

import gzip
import re
import subprocess
from pathlib import Path
from typing import Any, TypeAlias

from lxml import html as lxml_html

Element: TypeAlias = Any  # lxml's elements, which carry no types

BLOCKS = frozenset(
    (
        "p", "div", "section", "article", "blockquote", "ul", "ol", "dl", "table", "figure",
        "figcaption", "main", "body", "header", "footer", "form", "fieldset", "center",
        "address", "details", "summary",
    )
)  # fmt: skip
DROPPED = frozenset(
    (
        "script", "style", "head", "nav", "footer", "form", "button", "svg", "math", "img",
        "object", "iframe",
    )
)  # fmt: skip
DROPPED_CLASSES = re.compile(
    r"\b(headerlink|sphinxsidebar|related|navheader|navfooter|toc|toctree-wrapper|navigation|"
    r"footer|breadcrumb|indextable|menu|nav|sidebar|viewcode-link|anchorjs|searchbox|"
    r"titlepage|legalnotice|copyright|rst-footer-buttons|gallery|highlight-hidden)\b"
)
CONTENT_PATHS = (
    "//*[@role='main']",
    "//div[@class='body']",
    "//main",
    "//div[@class='contents']",
    "//div[@id='content']",
    "//article",
    "//body",
)
SPACES = re.compile(r"\s+")
BLANKS = re.compile(r"\n{3,}")
OVERSTRIKE = re.compile(r".\x08")
SUFFIXES = {
    ".html": "html", ".htm": "html", ".py": "python", ".rst": "text", ".txt": "text",
    ".md": "text", ".pod": "text", ".info": "info", ".pm": "perl", ".sh": "shell",
    ".en": "html",
}  # fmt: skip
MAN_PAGE = re.compile(r"/man/man\d\w*/[^/]+\.\d\w*(\.gz)?$")


def kind_of(path: Path) -> str | None:
    """Say how to read a file, or None where it holds no text for the corpus."""
    name = path.as_posix()
    if MAN_PAGE.search(name):
        return "man"
    stem = name[:-3] if name.endswith(".gz") else name
    if re.search(r"\.info(-\d+)?$", stem):
        return "info"
    if re.search(r"/README(\.\w+)?$", stem) and not stem.endswith(".html"):
        return "text"
    return SUFFIXES.get(Path(stem).suffix.lower())


def read_text(path: Path) -> str:
    """Read a file, unpacking gzip, as UTF-8 or else Latin-1."""
    data = path.read_bytes()
    if path.suffix in {".gz", ".dz"}:
        data = gzip.decompress(data)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("latin-1")


class PageWriter:
    """Collects the text of an HTML page, with headings and code kept as Markdown."""

    def __init__(self) -> None:
        self.parts: list[str] = []

    def inline(self, text: str | None) -> None:
        """Add running text, its white space collapsed."""
        if text:
            text = SPACES.sub(" ", text)
            if self.parts and self.parts[-1].endswith(("\n", " ")):
                text = text.lstrip()
            self.parts.append(text)

    def block(self) -> None:
        """Start a new paragraph."""
        if self.parts and not self.parts[-1].endswith("\n\n"):
            self.parts.append("\n\n")

    def line(self) -> None:
        """Start a new line."""
        if self.parts and not self.parts[-1].endswith("\n"):
            self.parts.append("\n")

    def walk(self, node: Element) -> None:
        """Write one element, its children and what follows each of them."""
        tag = node.tag
        if not isinstance(tag, str) or tag in DROPPED:
            return
        if DROPPED_CLASSES.search(node.get("class") or ""):
            return
        if tag == "pre":
            self.code(node)
        elif len(tag) == 2 and tag[0] == "h" and tag[1] in "123456":
            self.heading(node, int(tag[1]))
        elif tag == "br":
            self.line()
        elif tag == "code" and len(node) == 0 and node.text and "\n" not in node.text:
            self.inline(f"`{node.text.strip()}`")
        else:
            self.container(node, tag)

    def code(self, node: Element) -> None:
        """Write a block of code or terminal text between fences."""
        body = node.text_content().strip("\n").rstrip()
        if body:
            self.block()
            self.parts.append(f"```\n{body}\n```\n\n")

    def heading(self, node: Element, level: int) -> None:
        """Write a heading as Markdown."""
        title = SPACES.sub(" ", node.text_content()).strip(" ¶#")
        title = re.sub(r"^(chapter |appendix )?[\dA-Z]+(\.\d+)*\.\s+", "", title, flags=re.I)
        if title:
            self.block()
            self.parts.append(f"{'#' * level} {title}\n\n")

    def container(self, node: Element, tag: str) -> None:
        """Write an element that holds others."""
        if tag in BLOCKS:
            self.block()
        elif tag in {"li", "dt", "tr"}:
            self.line()
            if tag == "li":
                self.parts.append("- ")
        elif tag == "dd":
            self.line()
        self.inline(node.text)
        for child in node:
            self.walk(child)
            self.inline(child.tail)
        if tag in BLOCKS:
            self.block()
        elif tag in {"td", "th"}:
            self.parts.append(" | ")


def html_text(source: str) -> str:
    """The readable part of an HTML page."""
    try:
        tree = lxml_html.document_fromstring(source.encode("utf-8"), parser=PARSER)
    except (ValueError, lxml_html.etree.ParserError):
        return ""
    node: Element | None = None
    for path in CONTENT_PATHS:
        found = tree.xpath(path)
        if found:
            node = found[0]
            break
    if node is None:
        return ""
    writer = PageWriter()
    try:
        writer.walk(node)
    except RecursionError:
        return ""
    text = "".join(writer.parts).replace("\xa0", " ").replace("¶", "")
    lines = [re.sub(r"( \|)?\s+$", "", line) for line in text.split("\n")]
    return BLANKS.sub("\n\n", "\n".join(lines))


PARSER = lxml_html.HTMLParser(encoding="utf-8", remove_comments=True, remove_pis=True)


def man_text(path: Path) -> str:
    """A manual page as mandoc formats it, without bold, header and footer."""
    source = read_text(path)
    if source.startswith(".so ") or len(source) < 300:
        return ""
    command = ["mandoc", "-T", "utf8", "-O", "width=88,indent=4"]
    done = subprocess.run(command, input=source.encode(), capture_output=True, check=False)
    text = OVERSTRIKE.sub("", done.stdout.decode("utf-8", "replace"))
    lines = text.strip("\n").split("\n")
    return BLANKS.sub("\n\n", "\n".join(line.rstrip() for line in lines[1:-1])).strip()


def info_text(source: str) -> str:
    """An info file without its node lines and menus."""
    pieces: list[str] = []
    for node in source.split("\x1f")[1:]:
        body = node.strip("\n")
        if not body.startswith("File:"):
            continue
        body = body.partition("\n")[2]
        body = re.sub(r"^\* [^\n]*::.*(\n {10,}.*)*\n?", "", body, flags=re.M)
        pieces.append(body.replace("* Menu:", "").strip())
    return BLANKS.sub("\n\n", "\n\n".join(pieces))


def file_text(path: Path, kind: str) -> str:
    """The text of one file, cleaned as its kind asks for; empty where unreadable."""
    try:
        if kind == "man":
            return man_text(path)
        source = read_text(path).replace("\r\n", "\n").replace("\x0c", "\n")
    except (OSError, EOFError, ValueError):
        return ""
    if "\0" in source:
        return ""
    if kind == "html":
        return html_text(source) if "<" in source[:4000] else ""
    if kind == "info":
        return info_text(source)
    return BLANKS.sub("\n\n\n", "\n".join(line.rstrip() for line in source.split("\n")))
