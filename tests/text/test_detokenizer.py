"""The incremental detokenizer against a full decode."""

from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrail.text import IncrementalDetokenizer, Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(str(folder))


def pieces(ids: list[int], cuts: list[int]) -> list[list[int]]:
    """Cut `ids` into pieces whose lengths run through `cuts` again and again."""
    found, start, i = [], 0, 0
    while start < len(ids):
        found.append(ids[start : start + cuts[i % len(cuts)]])
        start, i = start + cuts[i % len(cuts)], i + 1
    return found


def incremental(tokenizer: Tokenizer, prompt: list[int], ids: list[int], cuts: list[int], skip: bool) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip)
    return "".join(detokenizer.push(piece) for piece in pieces(ids, cuts)) + detokenizer.flush()


def undone(tokenizer: Tokenizer, ids: list[int], skip: bool) -> bool:
    """Whether a full decode undoes valid characters: byte fallback, and a run of bytes that is malformed somewhere."""
    if not tokenizer.decoder.per_byte:
        return False
    shown = [token_id for token_id in ids if tokenizer.has_token(token_id)]
    shown = [token_id for token_id in shown if not (skip and token_id in tokenizer.special_ids)]
    runs = [list(run) for is_byte, run in groupby(shown, key=lambda token_id: 3 <= token_id < 259) if is_byte]
    texts = [b"".join(map(tokenizer.token_bytes, run)).decode(errors="replace") for run in runs]
    return any("\ufffd" in text and text.strip("\ufffd") for text in texts)


def greedy(tokenizer: Tokenizer, ids: list[int], skip: bool) -> str:
    """The slow reference where a full decode undoes: each valid character, and a replacement for each other byte."""
    data = b"".join(tokenizer.token_bytes(i) for i in ids if not (skip and i in tokenizer.special_ids))
    data = data[1:] if tokenizer.decoder.strip and data[:1] == b" " else data
    text = ""
    while data:
        length = next((n for n in (1, 2, 3, 4) if is_char(data[:n])), 0)
        text += data[:length].decode() if length else "\ufffd"
        data = data[length or 1 :]
    return text


def is_char(data: bytes) -> bool:
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False


CUTS = st.lists(st.integers(1, 4), min_size=1, max_size=5)


def test_any_split_of_a_text_equals_the_full_decode(tokenizer: Tokenizer) -> None:
    @settings(max_examples=60)
    @given(st.text(), CUTS, st.booleans(), st.booleans())
    def check(text: str, cuts: list[int], skip: bool, special: bool) -> None:
        ids = tokenizer.encode(text, special)
        assert incremental(tokenizer, [], ids, cuts, skip) == tokenizer.decode(ids, skip)

    check()


def test_text_behind_a_prompt_equals_what_the_full_decode_adds(tokenizer: Tokenizer) -> None:
    @settings(max_examples=60)
    @given(st.text(), st.integers(0, 40), CUTS, st.booleans())
    def check(text: str, cut: int, cuts: list[int], skip: bool) -> None:
        ids = tokenizer.encode(text, True)
        prompt, output = ids[:cut], ids[cut:]
        # A character that begins in the prompt belongs to the output that completes it.
        before = next(
            text for i in range(len(prompt), -1, -1) if "\ufffd" not in (text := tokenizer.decode(ids[:i], skip))
        )
        whole = tokenizer.decode(ids, skip)
        added = incremental(tokenizer, prompt, output, cuts, skip)
        if "\ufffd" not in whole:
            assert before + added == whole

    check()


def test_any_ids_equal_the_full_decode(tokenizer: Tokenizer) -> None:
    """Random ids: malformed byte sequences, special tokens, ids without a token."""

    @settings(max_examples=120)
    @given(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=12), CUTS, st.booleans())
    def check(ids: list[int], cuts: list[int], skip: bool) -> None:
        text = incremental(tokenizer, [], ids, cuts, skip)
        expected = greedy if undone(tokenizer, ids, skip) else Tokenizer.decode
        assert text == expected(tokenizer, ids, skip)

    check()


@pytest.mark.parametrize("name", ["llama2", "llama3"])
def test_malformed_bytes(folders: dict[str, Path], name: str) -> None:
    """Random runs of bytes, most of them malformed, between letters."""
    tokenizer = load_tokenizer(str(folders[name]))
    by_bytes = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size))}
    some = [0x41, 0x80, 0xAC, 0x82, 0xE2, 0xF0, 0x9F, 0xFF, 0xC3, 0xED, 0xA0]

    @settings(max_examples=200)
    @given(st.lists(st.sampled_from(some), max_size=10), CUTS)
    def check(data: list[int], cuts: list[int]) -> None:
        ids = [by_bytes[bytes([value])] for value in data]
        expected = greedy if undone(tokenizer, ids, True) else Tokenizer.decode
        assert incremental(tokenizer, [], ids, cuts, True) == expected(tokenizer, ids, True)

    check()


def test_no_piece_ends_inside_a_character(folders: dict[str, Path]) -> None:
    for name in ("llama3", "llama2"):
        tokenizer = load_tokenizer(str(folders[name]))
        detokenizer = IncrementalDetokenizer(tokenizer, [], True)
        out = [detokenizer.push([token_id]) for token_id in tokenizer.encode("🎊🎉", False)]
        assert {text for text in out if text.strip()} <= {"🎊", "🎉", "🎊🎉"}
        assert "".join(out) == "🎊🎉"


def test_an_unfinished_character_comes_at_the_end(folders: dict[str, Path]) -> None:
    for name, marks in (("llama3", "\ufffd"), ("llama2", "\ufffd\ufffd")):
        tokenizer = load_tokenizer(str(folders[name]))
        by_bytes = {tokenizer.token_bytes(token_id): token_id for token_id in range(tokenizer.vocab_size)}
        detokenizer = IncrementalDetokenizer(tokenizer, [], True)
        assert detokenizer.push([by_bytes[b"\xe2"], by_bytes[b"\x82"]]) == ""
        assert detokenizer.flush() == marks


def test_leading_space_of_sentencepiece(folders: dict[str, Path]) -> None:
    tokenizer = load_tokenizer(str(folders["llama2"]))
    ids = tokenizer.encode("the dog", False)
    bos = tokenizer.encode("", True)
    assert incremental(tokenizer, [], ids, [1], True) == "the dog"
    assert incremental(tokenizer, bos, ids, [1], True) == "the dog"
    assert incremental(tokenizer, bos, ids, [1], False) == " the dog"
    assert incremental(tokenizer, tokenizer.encode("and", True), ids, [1], True) == " the dog"
