"""The documentation: its links lead somewhere, what is made from code is current, indexes are complete."""

import re
import runpy
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(?<!!)\[(?:[^\]]|\n)*?\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def pages():
    """Every page that git knows or would take."""
    command = ["git", "ls-files", "-z", "-co", "--exclude-standard", "*.md"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    return sorted(Path(name) for name in listed.split("\0") if name and (ROOT / name).exists())


def anchors(text):
    """What headings are called in links, as GitHub makes it."""
    headings = re.findall(r"^#{1,6} +(.+?) *$", FENCE.sub("", text), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


def dead_links(page, text):
    """Relative links of a page that lead nowhere."""
    found = []
    for target in LINK.findall(FENCE.sub("", text)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (ROOT / page).parent / path if path else ROOT / page
        if not there.exists() or (anchor and there.suffix == ".md" and anchor not in anchors(there.read_text())):
            found.append(target)
    return found


@pytest.mark.parametrize("page", pages(), ids=str)
def test_links_lead_somewhere(page):
    assert dead_links(page, (ROOT / page).read_text()) == []


def test_what_the_makefile_names_is_there():
    text = (ROOT / "Makefile").read_text()
    paths = re.findall(r"\b(?:tests|scripts|deploy)/[\w./-]*\w", text)
    modules = [name.replace(".", "/") for name in re.findall(r"-m ((?:benchmarks|tests|deploy)[\w.]*)", text)]
    found = [*paths, *(f"{name}.py" if (ROOT / f"{name}.py").exists() else f"{name}/__main__.py" for name in modules)]
    assert len(found) > 50 and [name for name in found if not (ROOT / name).exists()] == []


def test_a_dead_link_is_seen():
    text = "[a](nowhere.md) [b](README.md#no-such) [c](README.md#try-it) [d](https://x.test/y)\n```\n[e](z)\n```\n"
    assert dead_links(Path("README.md"), text) == ["nowhere.md", "README.md#no-such"]


def test_the_page_of_settings_is_current():
    page = runpy.run_path(str(ROOT / "scripts" / "configuration.py"))["page"]()
    assert (ROOT / "docs" / "configuration.md").read_text() == page, "run make docs"


@pytest.mark.parametrize("folder", ["docs", "docs/decisions"])
def test_each_page_is_in_its_index(folder):
    index = (ROOT / folder / "README.md").read_text()
    names = {page.name for page in (ROOT / folder).glob("*.md")} - {"README.md"}
    missing = sorted(name for name in names if f"({name})" not in index)
    assert missing == []


def test_the_glossary_is_in_order_and_has_a_word_once():
    rows = re.search(r"^\| word \|.*?\n\|[-|]+\n(.*?)\n\n", (ROOT / "docs/concepts.md").read_text(), re.M | re.S)[1]
    words = [row.split("|")[1].strip() for row in rows.splitlines()]
    assert words == sorted(set(words), key=str.lower)


@pytest.mark.parametrize("page", ["README.md", "ARCHITECTURE.md"])
def test_what_a_newcomer_reads_first_is_short(page):
    assert len((ROOT / page).read_text().splitlines()) < 120
