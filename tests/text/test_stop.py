"""Stop strings in a stream against a search in the whole text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrail.text import StopMatcher


def run(stops: list[str], include: bool, parts: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include)
    emitted = ""
    for part in parts:
        result = matcher.push(part)
        emitted += result.text_to_emit
        if result.matched is not None:
            return emitted, result.matched
    result = matcher.flush()
    return emitted + result.text_to_emit, result.matched


def search(stops: list[str], include: bool, text: str) -> tuple[str, str | None]:
    """The slow reference: find in the whole text."""
    found = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    begin, length, stop = min(found)
    return text[: begin + length] if include else text[:begin], stop


SHORT = st.text(alphabet="ab", min_size=1, max_size=5)


@settings(max_examples=600)
@given(st.lists(SHORT, max_size=4), st.booleans(), st.lists(st.text(alphabet="abc", max_size=4), max_size=12))
def test_equals_a_search_in_the_whole_text(stops: list[str], include: bool, parts: list[str]) -> None:
    assert run(stops, include, parts) == search(stops, include, "".join(parts))


@settings(max_examples=300)
@given(st.lists(SHORT, min_size=1, max_size=3), st.lists(st.text(alphabet="abc", max_size=3), max_size=8))
def test_holds_back_only_what_may_become_a_stop(stops: list[str], parts: list[str]) -> None:
    matcher = StopMatcher(stops, False)
    seen = emitted = ""
    for part in parts:
        seen += part
        result = matcher.push(part)
        emitted += result.text_to_emit
        if result.matched is not None:
            return
        held = seen[len(emitted) :]
        assert not held or any(len(stop) > len(held) and stop.startswith(held) for stop in stops)


def test_examples() -> None:
    assert run(["\n\n"], False, ["one\n", "\ntwo"]) == ("one", "\n\n")
    assert run(["\n\n"], True, ["one\n", "\ntwo"]) == ("one\n\n", "\n\n")
    assert run(["abcd", "c"], False, ["ab", "c", "d"]) == ("", "abcd")
    assert run(["abcd", "c"], False, ["ab", "c", "x"]) == ("ab", "c")
    assert run(["abcd", "c"], False, ["ab", "c"]) == ("ab", "c")
    assert run([], False, ["x"]) == ("x", None)
    with pytest.raises(ValueError, match="empty"):
        StopMatcher([""], False)
