"""Wording: how questions are asked, and how a dictionary line becomes a sentence."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

WHAT_IS = (
    "What is {x}?", "What is {x}?", "What is {x}?", "what is {x}", "What's {x}?", "Explain {x}.",
    "Tell me about {x}.", "Describe {x}.", "Can you explain what {x} is?", "Define {x}.",
    "What does {x} mean?", "Please explain {x} in a few words.", "Could you tell me what {x} is?",
    "I keep seeing {x}. What is it?", "Give me a short description of {x}.",
)  # fmt: skip
WHAT_DOES = (
    "What does {x} do?", "What does {x} do?", "What is {x}?", "What is {x}?", "what is {x}?",
    "What is {x} used for?", "What is {x} for?", "Explain {x}.", "Tell me about {x}.",
    "Describe {x}.", "What's the purpose of {x}?", "When would I use {x}?", "{x}?",
    "Can you explain what {x} does?", "What is the use of {x}?",
)  # fmt: skip
COMMAND = (
    *WHAT_DOES, "What does the command {x} do?", "What does the {x} command do?",
    "What is the {x} command in Linux?", "What does `{x}` do?",
)  # fmt: skip
PACKAGE = (
    *WHAT_DOES, "What is the Debian package {x}?", "What does the package {x} provide?",
    "What is in the {x} package?", "Why would I install {x}?",
)  # fmt: skip
PYTHON = (
    "What does {x} do?", "What does {x} do in Python?", "What is {x} in Python?",
    "Explain {x} in Python.", "What does Python's {x} do?", "What is {x}?", "Describe {x}.",
    "How does {x} work in Python?",
)  # fmt: skip
MODULE = (
    "What is the {x} module?", "What is the Python module {x}?", "What does the {x} module do?",
    "What is {x} in Python?", "What is {x}?", "What is Python's {x} module for?",
    "Tell me about the Python module {x}.", "What does the Python module {x} provide?",
)  # fmt: skip
USAGE = ("How do I use {x}?", "What is the syntax of {x}?", "How do I call {x}?",
         "Show me the synopsis of {x}.", "How is {x} used?")  # fmt: skip
USAGE_NEXT = ("How do I use it?", "What is its syntax?", "Show me how to call it.",
              "And how is it used?", "Can you show the synopsis?")  # fmt: skip
OPTION = ("What does the {o} option of {x} do?", "What does {x} {o} do?",
          "What is the {o} option of {x} for?", "In {x}, what does {o} mean?",
          "Explain the option {o} of {x}.")  # fmt: skip
OPTION_NEXT = ("What does {o} do?", "And the {o} option?", "What is the {o} option for?")
MORE = ("Tell me more.", "Can you say more about it?", "Give me more detail.", "Go on.",
        "Explain it in more detail.")  # fmt: skip
LONG = ("Explain {x} in detail.", "Tell me everything about {x}.",
        "Give me a detailed description of {x}.", "Write a few paragraphs about {x}.")  # fmt: skip
HOW_TO = ("How do I {x}?", "How do I {x}?", "How can I {x}?", "How to {x}?",
          "Explain how to {x}.", "What is the way to {x}?")  # fmt: skip
CONTINUE = ("Continue this text:\n\n{x}", "Continue:\n\n{x}", "Write what comes next:\n\n{x}",
            "Please continue the following text.\n\n{x}")  # fmt: skip
WRITE = ("Write a Python function to {x}.", "Write Python code to {x}.",
         "Show me a Python function to {x}.", "Implement a function in Python to {x}.")  # fmt: skip
READ_CODE = ("What does this Python function do?\n\n```python\n{x}\n```",
             "Explain this code:\n\n```python\n{x}\n```",
             "Write a docstring for this function.\n\n```python\n{x}\n```")  # fmt: skip
READ_PAGE = ("Here is a manual page:\n\n{x}\n\nWhat does it describe?",
             "{x}\n\nWhat is this manual page about?",
             "Summarise this page in one sentence:\n\n{x}")  # fmt: skip
SYSTEM = (
    "You are a helpful assistant.", "You are a helpful assistant.", "Answer the question.",
    "You are a technical assistant for Linux and Python users.", "Be concise.",
    "You are kvrail's demo model.", "You are an expert system administrator.",
)  # fmt: skip

VERBS = frozenset(
    (
        "abort", "accept", "access", "acknowledge", "acquire", "activate", "adapt", "add",
        "adjust", "administer", "align", "allocate", "allow", "alter", "analyse", "analyze",
        "annotate", "append", "apply", "approve", "archive", "arrange", "ask", "assemble",
        "assert", "assign", "attach", "authenticate", "back", "backup", "balance", "begin",
        "benchmark", "bind", "bisect", "block", "boot", "break", "browse", "build", "bump",
        "calculate", "call", "cancel", "capture", "carry", "cast", "catch", "chain", "change",
        "check", "checkout", "choose", "clean", "cleanup", "clear", "clone", "close",
        "collect", "colorize", "combine", "commit", "communicate", "compare", "compile",
        "compose", "compress", "compute", "concatenate", "configure", "confirm", "connect",
        "construct", "consult", "control", "convert", "copy", "correct", "count", "cover",
        "create", "cut", "debug", "decide", "declare", "decode", "decompress", "decrypt",
        "define", "delete", "deliver", "demangle", "describe", "destroy", "detach", "detect",
        "determine", "diagnose", "diff", "disable", "disassemble", "disconnect", "discover",
        "dispatch", "display", "dissect", "do", "download", "draw", "dump", "duplicate",
        "echo", "edit", "eject", "elevate", "embed", "emit", "emulate", "enable", "encode",
        "encrypt", "end", "enforce", "enqueue", "ensure", "enter", "enumerate", "erase",
        "escape", "establish", "estimate", "evaluate", "examine", "exchange", "execute",
        "exit", "expand", "export", "extend", "extract", "factor", "fetch", "fill", "filter",
        "find", "finish", "fix", "flash", "flush", "fold", "follow", "force", "fork",
        "format", "forward", "free", "freeze", "generate", "get", "give", "go", "grant",
        "graph", "group", "guess", "halt", "handle", "help", "hide", "hold", "identify",
        "ignore", "import", "include", "increase", "index", "indicate", "inflate", "inform",
        "initialise", "initialize", "initiate", "insert", "inspect", "install", "instantiate",
        "instrument", "interact", "interpret", "invoke", "issue", "iterate", "join", "jump",
        "keep", "kill", "launch", "let", "limit", "link", "list", "listen", "load", "locate",
        "lock", "log", "login", "look", "loop", "make", "manage", "manipulate", "map", "mark",
        "match", "measure", "merge", "migrate", "mirror", "modify", "monitor", "mount",
        "move", "name", "navigate", "negotiate", "normalize", "notify", "obtain", "open",
        "operate", "optimize", "order", "output", "override", "pack", "parse", "partition",
        "pass", "paste", "patch", "pause", "peek", "perform", "pick", "pipe", "place", "play",
        "plot", "poll", "pop", "populate", "position", "post", "prepare", "prepend",
        "preprocess", "present", "preserve", "print", "probe", "process", "produce",
        "profile", "prompt", "protect", "provide", "prune", "publish", "pull", "purge",
        "push", "put", "query", "queue", "quit", "raise", "randomize", "rank", "read",
        "reboot", "rebuild", "receive", "recode", "record", "recover", "recursively",
        "redirect", "reduce", "refresh", "register", "release", "reload", "remap", "remove",
        "rename", "render", "reorder", "repair", "repeat", "replace", "replay", "report",
        "repository", "represent", "request", "require", "reset", "resize", "resolve",
        "restart", "restore", "restrict", "resume", "retrieve", "return", "reverse", "revert",
        "revoke", "rewrite", "rotate", "round", "route", "run", "sample", "save", "scan",
        "schedule", "scrub", "search", "select", "send", "serialize", "serve", "set", "setup",
        "shorten", "show", "shred", "shuffle", "shut", "shutdown", "sign", "signal",
        "simulate", "skip", "sleep", "snapshot", "solve", "sort", "spawn", "specify", "spell",
        "split", "squash", "start", "stash", "stop", "store", "stream", "strip", "submit",
        "substitute", "subscribe", "sum", "summarize", "suspend", "swap", "switch",
        "synchronize", "tag", "take", "tell", "terminate", "test", "time", "toggle", "touch",
        "trace", "track", "transfer", "transform", "translate", "traverse", "trigger", "trim",
        "truncate", "try", "tune", "turn", "undo", "uninstall", "unload", "unlock", "unmount",
        "unpack", "unset", "unwrap", "update", "upgrade", "upload", "use", "validate",
        "verify", "view", "visualize", "wait", "wake", "walk", "warn", "watch", "wipe",
        "wrap", "write", "yield", "zero",
    )
)  # fmt: skip


def ask(chance: random.Random, forms: Sequence[str], **words: str) -> str:
    """One of the forms of a question, filled in."""
    return chance.choice(forms).format(**words)


def article(words: str) -> str:
    """The words with "a" or "an" in front, or "the" before a proper name."""
    first = words.split()[0]
    if re.match(r"(?i)(an?|the|one|some|any|your|this)$", first):
        return words[0].lower() + words[1:]
    if first[0].isupper() and not first.isupper() and words.count(" ") > 0 and len(first) > 1:
        return f"the {words}" if words.split()[1][0].isupper() else with_a(lower_first(words))
    return with_a(words)


def with_a(words: str) -> str:
    """The words after the indefinite article that their sound asks for."""
    first = words.split()[0]
    vowel = bool(re.match(r"(?i)([aeio]|u(?!ni|s[eu]|til|tf)|hour|html|ssh\b|x\b)", first))
    if first[:2].isupper() and first[0] in "FHLMNRSX" and first[:3] not in {"SCS", "RAI", "LAN"}:
        vowel = True
    return f"{'an' if vowel else 'a'} {words}"


def lower_first(words: str) -> str:
    """The words with a small first letter, unless the first word is an acronym."""
    first = words.split()[0]
    if sum(c.isupper() for c in first) > 1 or first in {"I", "X", "C"}:
        return words
    return words[0].lower() + words[1:]


def base_form(word: str) -> str | None:
    """The verb that a third person ("prints") or a gerund ("creating") comes from."""
    word = word.lower()
    stems: list[str] = []
    if word.endswith("ing") and len(word) > 5:
        stem = word[:-3]
        stems = [stem + "e", stem, stem[:-1] if stem[-1:] == stem[-2:-1] else stem]
    elif word.endswith("s"):
        stems = [word[:-1], word[:-2], word[:-3] + "y"]
    return next((s for s in stems if s in VERBS), None)


def sentence(name: str, what: str, thing: str) -> str:
    """Turn "grep" and "print lines that match patterns" into a full sentence."""
    what = what.strip().rstrip(".")
    first = re.split(r"[\s/,]", what)[0].lower()
    if first in VERBS:
        return f"{name} is {with_a(thing)} used to {lower_first(what)}."
    if base_form(first) and first.endswith("s"):
        return f"{name} is {with_a(thing)} that {lower_first(what)}."
    if first.endswith("ing") and base_form(first):
        return f"{name} is {with_a(thing)} for {lower_first(what)}."
    head = re.split(r" (?:for|of|to|that|which|with|from|in|on|and|by|using|-) |[,(;:]", what)[0]
    if re.search(r"[a-z]{2}(?<![su])s$", head) and not re.match(r"(?i)(an?|the) ", what):
        return f"{name} provides {lower_first(what)}."
    return f"{name} is {article(what)}."


SENTENCE_END = re.compile(r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)(?<!etc\.)\s+(?=[A-Z`\"'(\[])")


def first_sentences(text: str, most: int, room: int) -> str:
    """Up to ``most`` whole sentences of a paragraph that fit in ``room`` characters."""
    kept: list[str] = []
    for part in SENTENCE_END.split(" ".join(text.split())):
        if len(kept) == most or sum(map(len, kept)) + len(part) > room:
            break
        kept.append(part)
    result = " ".join(kept)
    return result if result.endswith((".", "!", "?", ")")) else ""
