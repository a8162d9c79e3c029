"""What a terminal shows of an answer with drafts, on a small emulator."""

import os
import random
import re

import pytest

from kvrail.cli.remote.drafts import DraftScreen, shows_drafts

COLUMNS, ROWS = 12, 8
ESCAPE = re.compile(r"\x1b\[(\d*)([A-Za-z])")


class Screen:
    """Rows of (character, dim); a full row wraps only when the next character comes, as terminals do."""

    def __init__(self):
        self.rows, self.row, self.column, self.dim = [[]], 0, 0, False

    def write(self, text):
        position = 0
        while position < len(text):
            escape = ESCAPE.match(text, position)
            if escape:
                self.escape(escape[1], escape[2])
                position = escape.end()
                continue
            self.put(text[position])
            position += 1

    def escape(self, number, letter):
        if letter == "m":
            self.dim = number == "2"
        elif letter == "A":
            self.row -= int(number)
            assert self.row >= 0
        elif letter == "J":
            self.rows = self.rows[: self.row + 1]
            self.rows[self.row] = self.rows[self.row][: self.column]
        else:
            raise AssertionError(letter)

    def put(self, character):
        if character == "\r":
            self.column = 0
            return
        if character == "\n" or self.column == COLUMNS:
            self.row, self.column = self.row + 1, 0
            if self.row == len(self.rows):
                self.rows.append([])
        if character != "\n":
            self.rows[self.row][self.column : self.column + 1] = [(character, self.dim)]
            self.column += 1

    def flush(self):
        pass

    def text(self, *, dim=None):
        return "".join(c for row in self.rows for c, faint in row if dim in (None, faint))


def plain(text):
    """A screen on which `text` was simply written."""
    screen = Screen()
    screen.write(text)
    return screen.rows


@pytest.mark.parametrize("seed", range(60))
def test_after_every_step_the_screen_has_what_is_certain_and_the_drafts(seed):
    """Rounds of drafts of which some are right; some words fill a row exactly, some break it."""
    rng = random.Random(seed)
    words = ["a", "bc ", "\n", "defg", " hij\n", "klmnopqrstuv", "w" * 11, " "]
    screen = Screen()
    drawn = DraftScreen(screen, os.terminal_size((COLUMNS, ROWS)))
    certain, position = "", 0
    for _ in range(6):
        guesses = [rng.choice(words) for _ in range(rng.randint(0, 4))]
        right = rng.randint(0, len(guesses))
        for number, guess in enumerate(guesses):
            drawn.news({"provisional": {"index": 0, "position": position + number, "tokens": 1, "text": guess}})
            drafts = "".join(guesses[: number + 1])
            if len(plain("\n".join([certain.rpartition("\n")[2], drafts]))) < ROWS:
                assert screen.text() == certain.replace("\n", "") + drafts.replace("\n", "")
                assert screen.text(dim=True) == drafts.replace("\n", "")
        member = {}
        if right:
            member["confirm"] = {"index": 0, "position": position, "tokens": right}
        if right < len(guesses):
            member["retract"] = {"index": 0, "position": position + right}
        if member:
            drawn.news(member)
            assert screen.text(dim=True) == ""
        for text in [*guesses[:right], rng.choice(words)]:
            certain += text
            position += 1
            drawn.write(text)
        assert screen.rows == plain(certain)
    drawn.news({"provisional": {"index": 0, "position": position, "tokens": 1, "text": "never confirmed"}})
    drawn.close()
    assert screen.rows == plain(certain)


def test_text_that_differs_from_what_was_confirmed_replaces_it():
    """A stop string cut the text, or part of it is held back."""
    screen = Screen()
    drawn = DraftScreen(screen, os.terminal_size((COLUMNS, ROWS)))
    drawn.news({"provisional": {"index": 0, "position": 0, "tokens": 1, "text": "one"}})
    drawn.news({"confirm": {"index": 0, "position": 0, "tokens": 1}})
    drawn.write("o")
    assert screen.text() == "one"
    drawn.write("ther")
    assert screen.text() == "other"
    drawn.close()
    assert screen.rows == plain("other")


def test_drafts_that_come_again_replace_the_earlier_ones():
    """After a transfer that failed, drafting begins anew at the same position."""
    screen = Screen()
    drawn = DraftScreen(screen, os.terminal_size((COLUMNS, ROWS)))
    for text in ("ab", "xy"):
        drawn.news({"provisional": {"index": 0, "position": 0, "tokens": 1, "text": text}})
    assert screen.text() == "xy"


@pytest.mark.parametrize(
    ("terminal", "environment", "shown"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"TERM": "dumb"}, False),
    ],
)
def test_where_drafts_are_shown(monkeypatch, terminal, environment, shown):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    stream = type("Stream", (), {"isatty": lambda self: terminal})()
    assert shows_drafts(stream) == shown
