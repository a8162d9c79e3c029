"""Make chat turns from the corpus, from package descriptions and from our own notes.

    python3 questions.py --work SCRATCH_FOLDER

reads SCRATCH_FOLDER/corpus.jsonl and ``apt-cache dumpavail``, and writes
SCRATCH_FOLDER/questions.jsonl: one conversation a line, with its topic, by
whose hash whole topics are held out.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mine_docs
import mine_man
import mine_python
from corpus import Document, fraction
from phrases import PACKAGE, SYSTEM, ask, first_sentences, sentence

HERE = Path(__file__).resolve().parent
HELD_OUT_SHARE = 0.015
Turns = list[tuple[str, str]]
Conversation = tuple[str, Turns]


def stanzas(text: str) -> Iterator[dict[str, str]]:
    """The stanzas of an apt listing, long descriptions joined by newlines."""
    for stanza in text.split("\n\n"):
        fields: dict[str, str] = {}
        key = ""
        for line in stanza.split("\n"):
            if line[:1] == " ":
                fields[key] = fields.get(key, "") + "\n" + line[1:]
            elif ": " in line:
                key, value = line.split(": ", 1)
                fields[key] = value
        if "Package" in fields:
            yield fields


def wanted_by(packages: list[dict[str, str]]) -> Counter[str]:
    """How many packages depend on or recommend each package."""
    count: Counter[str] = Counter()
    for fields in packages:
        for key in ("Depends", "Recommends", "Suggests"):
            for item in fields.get(key, "").split(","):
                name = item.strip().split(" ")[0].split(":")[0]
                count[name] += 1
    return count


def is_tool(fields: dict[str, str]) -> bool:
    """Whether a package is something to ask about, not a part of something else."""
    name, section = fields["Package"], fields.get("Section", "").split("/")[-1]
    if section in {"debug", "localization", "oldlibs", "translations", "libdevel", "metapackages"}:
        return False
    parts = (
        "-dev",
        "-dbg",
        "-doc",
        "-data",
        "-common",
        "-l10n",
        "-dbgsym",
        "-help",
        "task-",
        "-prof",
        "linux-image",
        "linux-headers",
        "libghc",
        "r-cran-",
        "gir1.2-",
        "node-",
    )
    if any(p in name for p in parts) or name.startswith(("fonts-", "elpa-", "r-bioc", "librust-", "golang-github")):
        return False
    text = fields.get("Description", "").lower()
    return not any(w in text[:200] for w in ("transitional", "dummy", "shared librar", "metapackage"))


def listings(folder: Path, ending: str) -> Iterator[dict[str, str]]:
    """The stanzas of apt's own lists of the section "main" whose names end so."""
    for path in sorted(folder.glob(f"*_main_*{ending}*")):
        command = ["/usr/lib/apt/apt-helper", "cat-file", str(path)]
        done = subprocess.run(command, capture_output=True, check=True)
        yield from stanzas(done.stdout.decode(errors="replace"))


def fetch_listings(folder: Path) -> None:
    """Have apt fetch its lists, English descriptions included, into a folder of ours."""
    if not list(folder.glob("*Translation-en*")):
        (folder / "partial").mkdir(parents=True, exist_ok=True)
        options = ["-o", f"Dir::State::Lists={folder}", "-o", "Acquire::Languages=en"]
        subprocess.run(["apt-get", "update", "-q", *options], check=True)


def package_turns(folder: Path, commands: set[str], chance: random.Random) -> Iterator[Conversation]:
    """What a Debian package is, asked more often of those that many packages want."""
    fetch_listings(folder)
    packages = list({f["Package"]: f for f in listings(folder, "_Packages")}.values())
    long = {f["Package"]: f["Description-en"] for f in listings(folder, "Translation-en")}
    popular = wanted_by(packages)
    for fields in packages:
        name = fields["Package"]
        text = long.get(name, "")
        if name in commands or not is_tool(fields) or "\n" not in text:
            continue
        short, body = text.split("\n", 1)
        paragraph = body.split("\n.\n")[0]
        rank = popular[name] + (20 if fields.get("Priority") in {"required", "important"} else 0)
        library = fields.get("Section", "").split("/")[-1] in {"libs", "perl", "ruby", "haskell"}
        if rank < 1 and (library or fraction("keep " + name) > 0.5):
            continue
        copies = min(6, 1 + round(math.log2(1 + rank) / 1.6))
        for _ in range(copies):
            answer = sentence(name, short, "package")
            if not any(" " * 2 in line[:2] for line in paragraph.split("\n")):
                extra = first_sentences(paragraph, chance.choice((0, 1, 2, 2)), 420)
                answer = f"{answer} {extra}".strip()
            yield name, [(ask(chance, PACKAGE, x=name), answer)]


def own_turns(chance: random.Random) -> Iterator[Conversation]:
    """Our own hand-written turns: who the model is, greetings, and words of LLM serving."""
    for block in (HERE / "own_turns.txt").read_text().split("\n\n"):
        lines = [line for line in block.strip().split("\n") if not line.startswith("#")]
        asks = [line[3:] for line in lines if line.startswith("Q: ")]
        answers = [line[3:] for line in lines if line.startswith("A: ")]
        for question in asks:
            for _ in range(8):
                yield "own " + asks[0], [(question, chance.choice(answers))]


def dress(turns: Turns, chance: random.Random) -> list[dict[str, str]]:
    """The turns as chat messages, with a system message now and then."""
    messages: list[dict[str, str]] = []
    if chance.random() < 0.12:
        messages.append({"role": "system", "content": chance.choice(SYSTEM)})
    for question, answer in turns:
        messages.append({"role": "user", "content": question.strip()})
        messages.append({"role": "assistant", "content": answer.strip()})
    return messages


def chained(made: list[Conversation], chance: random.Random) -> Iterator[Conversation]:
    """Conversations of two to four turns on different topics, none of them held out."""
    short = [c for c in made if len(c[1]) == 1 and len(c[1][0][1]) < 500 and not held_out(c[0])]
    for _ in range(len(short) // 12):
        picked = chance.sample(short, chance.choice((2, 2, 3, 4)))
        yield picked[0][0], [turn for _, turns in picked for turn in turns]


def held_out(topic: str) -> bool:
    """Whether a topic is kept from training."""
    return not topic.startswith("own ") and fraction("topic " + topic.lower()) < HELD_OUT_SHARE


def main() -> None:
    """Write all conversations, shuffled."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    args = parser.parse_args()
    chance = random.Random(7)
    with (args.work / "corpus.jsonl").open() as lines:
        corpus: list[Document] = [json.loads(line) for line in lines]
    commands = mine_man.core_names(corpus)
    made: list[Conversation] = []
    for label, found in (
        ("packages", package_turns(args.work / "lists", commands, chance)),
        ("manual pages", mine_man.turns(corpus, chance)),
        ("documentation", mine_docs.turns(corpus, chance)),
        ("Python", mine_python.turns(corpus, chance)),
        ("own", own_turns(chance)),
    ):
        before = len(made)
        made.extend(found)
        print(f"{label:14} {len(made) - before:7} conversations")
    made.extend(chained(made, chance))
    chance.shuffle(made)
    count: Counter[bool] = Counter()
    with (args.work / "questions.jsonl").open("w") as out:
        for topic, turns in made:
            row: dict[str, Any] = {"topic": topic, "messages": dress(turns, chance)}
            row["heldout"] = held_out(topic)
            count[row["heldout"]] += 1
            out.write(json.dumps(row, ensure_ascii=False) + "\n")
    print(f"{count[False]} for training, {count[True]} held out")


if __name__ == "__main__":
    main()
