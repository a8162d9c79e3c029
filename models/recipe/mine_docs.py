"""Chat turns from documentation: definitions, how-to headings, the FOLDOC dictionary."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import phrases
from corpus import Document, fraction
from phrases import ask, base_form, first_sentences, lower_first, with_a

Turns = list[tuple[str, str]]
SUBJECT = re.compile(
    r"^(?:(An?|The) )?((?:[A-Z`][\w`.+#/-]*|[a-z][\w-]+)(?: [\w`.+#/-]+){0,2}) (is|are) (?:an? |the |one )"
)
VAGUE = frozenset(
    (
        "this", "it", "that", "these", "those", "there", "here", "what", "which", "who", "if",
        "when", "where", "he", "she", "they", "we", "you", "i", "each", "all", "any", "every",
        "some", "another", "one", "two", "both", "such", "following", "first", "second",
        "third", "last", "next", "other", "above", "below", "default", "only", "same", "main",
        "idea", "problem", "result", "reason", "purpose", "following", "example", "value",
        "name", "argument", "parameter", "function", "method", "option", "note", "currently",
        "however", "again", "default", "then", "also", "usually", "otherwise", "return",
        "output", "input",
    )
)  # fmt: skip
HEADING = re.compile(r"^#{1,5} (.+)$", re.M)
FOLDOC_LABEL = re.compile(r"^\s*(?:<([\w ,/&'.()-]+)>)?\s*", re.S)
PYTHON_DOCS = "python3.11-doc"
NAMED = re.compile(r"^(?:class |exception |@|async )?([A-Za-z_][\w.]*)\((.*)\)$")


def prose(text: str) -> Iterator[str]:
    """The paragraphs of running text in a document, outside code."""
    fenced = False
    for block in text.split("\n\n"):
        if block.startswith("```") or block.endswith("```"):
            fenced = not (block.startswith("```") and block.endswith("```")) and not fenced
            continue
        if not fenced and len(block) > 70 and block[:1] not in "-#|>.*:= " and "\n-" not in block:
            yield " ".join(block.split())


def definitions(document: Document, chance: random.Random) -> Iterator[tuple[str, Turns]]:
    """Sentences of the form "A semaphore is a …" as answers to "What is a semaphore?"."""
    for paragraph in prose(document["text"]):
        match = SUBJECT.match(paragraph)
        if not match or len(match.group(2)) < 3:
            continue
        words = match.group(2).replace("`", "").lower().split()
        if any(w in VAGUE for w in words) or words[-1].endswith("ly") or "of" in words[-1:]:
            continue
        answer = first_sentences(paragraph, chance.choice((1, 2, 2, 3)), 420)
        if len(answer) < 50:
            continue
        subject = match.group(2).replace("`", "")
        name = f"{match.group(1).lower()} {lower_first(subject)}" if match.group(1) else subject
        forms = phrases.WHAT_IS
        question = ask(chance, forms, x=name)
        if match.group(3) == "are":
            question = re.sub(r"\b([Ww]hat) is\b", r"\1 are", question).replace("What's", "What are")
            question = question.replace(" is?", " are?").replace("is it?", "are they?")
            question = question.replace("What does", "What do")
        yield subject, [(question, answer)]


def how_to(document: Document, chance: random.Random) -> Iterator[tuple[str, Turns]]:
    """Headings like "Creating a table" as questions, their first paragraph as the answer."""
    pieces = HEADING.split(document["text"])
    for title, body in zip(pieces[1::2], pieces[2::2], strict=False):
        words = title.strip().rstrip("?.").split()
        blocks = [b for b in body.strip().split("\n\n") if b.strip()]
        if not 2 <= len(words) <= 9 or not blocks or blocks[0][:1] in "#-`|.:*":
            continue
        verb = base_form(words[0]) if words[0].endswith("ing") else None
        if verb:
            question = ask(chance, phrases.HOW_TO, x=" ".join([verb, *lower_words(words[1:])]))
        elif [w.lower() for w in words[:2]] == ["how", "to"]:
            question = ask(chance, phrases.HOW_TO, x=" ".join(lower_words(words[2:])))
        elif title.strip().endswith("?") and len(words) > 3:
            question = title.strip()
        else:
            continue
        answer = " ".join(blocks[0].split())
        if answer.endswith(":") and len(blocks) > 1 and blocks[1].startswith("```"):
            answer = f"{answer}\n\n{blocks[1]}"
            if not blocks[1].endswith("```") or len(answer) > 1500:
                continue
        else:
            answer = first_sentences(answer, 4, 600)
        if len(answer) > 60:
            yield question, [(question, answer)]


def lower_words(words: list[str]) -> list[str]:
    """The words of a title with small letters, acronyms and names with digits aside."""
    return [w.lower() if w[1:].islower() or w in {"A", "An", "The"} else w for w in words]


def continuation(document: Document, chance: random.Random) -> Iterator[tuple[str, Turns]]:
    """The start of a passage as a request to continue it, some hundred tokens as the answer."""
    passages = list(prose(document["text"]))
    if len(passages) < 4:
        return
    start = chance.randrange(len(passages) - 3)
    head = passages[start][:400].rpartition(".")[0] + "."
    rest = "\n\n".join([passages[start][len(head) :].strip(), *passages[start + 1 : start + 6]])
    rest = rest.strip()[: chance.choice((700, 1200, 2000))].rpartition(".")[0] + "."
    if len(head) > 60 and len(rest) > 300:
        yield document["name"], [(ask(chance, phrases.CONTINUE, x=head), rest)]


def word_counts(corpus: list[Document]) -> Counter[str]:
    """How often words and pairs of words occur in an eighth of the documentation."""
    count: Counter[str] = Counter()
    for document in corpus[::8]:
        if document["kind"] in {"html", "man", "text", "info"}:
            words = re.findall(r"[a-z][a-z0-9+#-]*", document["text"].lower())
            count.update(words)
            count.update(map(" ".join, pairwise(words)))
    return count


def foldoc(document: Document, count: Counter[str], chance: random.Random) -> Iterator[tuple[str, Turns]]:
    """The entries of the Free On-line Dictionary of Computing, often used words more often."""
    for entry in re.split(r"\n\n(?=\S)", document["text"]):
        title, _, body = entry.partition("\n")
        body = re.sub(r"/[^/\n]{2,30}/ ", "", body.strip(), count=1)
        body = re.sub(r'^\((?:Or|After|From|Formerly)? ?"[^)]*\) ', "", body)
        match = FOLDOC_LABEL.match(body)
        body = body[match.end() :] if match else body
        parts = re.split(r"\n\s*\n", body)
        if not 1 < len(title) < 45 or not parts or len(parts[0]) < 30:
            continue
        text = re.sub(r"\s*\([^)]*(?:http|ftp|\d{4}-\d\d-\d\d)[^)]*\)", "", parts[0])
        text = re.sub(r"^\([^)]{0,90}\)\s+", "", re.sub(r"^\d\. ", "", text))
        answer = first_sentences(text, chance.choice((1, 2, 2, 3)), 450)
        if len(answer) < 30 or answer.startswith(("See ", "Alternative", "An alternative spelling")):
            continue
        common = title.islower() and title.isalpha() and not title.endswith("s")
        for _ in range(1 + min(6, count[title.lower()].bit_length() // 2)):
            name = with_a(title) if common and chance.random() < 0.7 else title
            if re.match(r"(An?|The) ", answer):
                verb = "are" if re.search(r"[a-z]{2}(?<![su])s$", title) and title.islower() else "is"
                opening = name[0].upper() + name[1:] if name != title else name
                said = f"{opening} {verb} {answer[0].lower()}{answer[1:]}"
            elif title.isupper() and answer.count(".") == 1 and len(answer) < 90:
                said = f"{title} stands for {answer}"
            else:
                said = answer
            yield title, [(ask(chance, phrases.WHAT_IS, x=name), said)]


def python_names(document: Document, chance: random.Random) -> Iterator[tuple[str, Turns]]:
    """The functions, classes and modules of the Python library reference."""
    blocks = [b for b in document["text"].split("\n\n") if b.strip()]
    for block, after in pairwise(blocks):
        signature = " ".join(block.split("\n")[-1].split())
        match = NAMED.match(signature)
        text = first_sentences(after, chance.choice((1, 2, 3)), 420)
        if not match or len(text) < 30 or after.startswith(("```", "#", "-")):
            continue
        name = match.group(1)
        for _ in range(4):
            asked = chance.choice((name, name, f"{name}()", f"`{name}`"))
            answer = text if chance.random() < 0.5 else f"`{signature}`: {text}"
            yield name, [(ask(chance, phrases.PYTHON, x=asked), answer)]
    title = HEADING.match(document["text"])
    module = re.match(r"`?([\w.]+)`? — (.+)", title.group(1)) if title else None
    paragraphs = [p for p in prose(document["text"]) if not p.startswith("Source code")]
    if module and paragraphs:
        for _ in range(8):
            text = first_sentences(paragraphs[0], chance.choice((1, 2)), 420)
            answer = f"{module.group(1)} is a Python module: {module.group(2)}. {text}".strip()
            yield module.group(1), [(ask(chance, phrases.MODULE, x=module.group(1)), answer)]


def glossary(document: Document, chance: random.Random) -> Iterator[tuple[str, Turns]]:
    """The terms of the Python glossary."""
    blocks = [b.strip() for b in document["text"].split("\n\n") if b.strip()]
    for term, text in pairwise(blocks):
        answer = first_sentences(text, chance.choice((1, 2, 3)), 450)
        if len(term) < 40 and "." not in term.rstrip(".") and len(answer) > 40:
            for _ in range(6):
                name = with_a(term) if term.islower() and chance.random() < 0.6 else term
                suffix = chance.choice(("", "", " in Python"))
                yield term, [(ask(chance, phrases.WHAT_IS, x=name + suffix), answer)]


def turns(corpus: list[Document], chance: random.Random) -> Iterator[tuple[str, Turns]]:
    """Conversations about every page of documentation of the training part."""
    count = word_counts(corpus)
    for document in corpus:
        if document["heldout"] or document["kind"] in {"python", "man", "perl", "shell"}:
            continue
        if document["kind"] == "dictionary":
            if document["source"] == "dict-foldoc":
                yield from foldoc(document, count, chance)
            continue
        if document["source"] == PYTHON_DOCS:
            if document["name"].endswith("/glossary.html"):
                yield from glossary(document, chance)
            elif "/library/" in document["name"]:
                yield from python_names(document, chance)
        yield from definitions(document, chance)
        yield from how_to(document, chance)
        if fraction("continue " + document["name"]) < 0.45:
            yield from continuation(document, chance)
