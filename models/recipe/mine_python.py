"""Chat turns from Python sources: write a function, or say what one does."""

from __future__ import annotations

import ast
import random
import textwrap
import warnings
from collections.abc import Iterator

import phrases
from corpus import Document, fraction
from phrases import VERBS, ask, base_form, first_sentences, lower_first

Turns = list[tuple[str, str]]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def infinitive(text: str) -> str | None:
    """Turn "Returns the sum." into "return the sum", or give None where it is no such sentence."""
    words = text.rstrip(".").split()
    if not 3 <= len(words) <= 22:
        return None
    first = words[0].lower()
    verb = first if first in VERBS else base_form(first) if first.endswith("s") else None
    return " ".join([verb, *words[1:]]) if verb else None


def without_docstring(node: Function, lines: list[str]) -> str:
    """The source of a function less its docstring."""
    doc = node.body[0]
    kept = lines[node.lineno - 1 : doc.lineno - 1] + lines[doc.end_lineno or 0 : node.end_lineno]
    return textwrap.dedent("\n".join(kept)).strip("\n")


def function_turns(node: Function, lines: list[str], chance: random.Random) -> Iterator[tuple[str, Turns]]:
    """Conversations about one documented function."""
    doc = ast.get_docstring(node)
    source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
    if not doc or len(node.body) < 2 or node.name.startswith("test"):
        return
    summary = first_sentences(doc.split("\n\n")[0], 2, 300)
    task = infinitive(first_sentences(doc.split("\n\n")[0], 1, 200))
    method = bool(node.args.args) and node.args.args[0].arg in {"self", "cls"}
    if task and not method and 80 < len(source) < 1600:
        answer = f"```python\n{source}\n```"
        yield node.name, [(ask(chance, phrases.WRITE, x=task), answer)]
    bare = without_docstring(node, lines)
    if summary and len(summary) > 25 and 60 < len(bare) < 1500 and chance.random() < 0.5:
        answer = summary
        if task and chance.random() < 0.5:
            answer = f"The function `{node.name}` is used to {lower_first(task)}."
        yield node.name, [(ask(chance, phrases.READ_CODE, x=bare), answer)]


def turns(corpus: list[Document], chance: random.Random) -> Iterator[tuple[str, Turns]]:
    """Conversations about the documented functions of the training part's Python files."""
    for document in corpus:
        if document["kind"] != "python" or document["heldout"]:
            continue
        share = 1.0 if document["source"].startswith("libpython3") else 0.8
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(document["text"])
        except (SyntaxError, ValueError, RecursionError):
            continue
        lines = document["text"].split("\n")
        for node in ast.walk(tree):
            if isinstance(node, Function) and fraction(document["name"] + node.name) < share:
                yield from function_turns(node, lines, chance)
