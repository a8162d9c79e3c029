"""How short the ids of a text can be at most: checked against the tokenizers themselves."""

import random

import pytest
import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from kvrail.errors import ContextLengthError
from kvrail.text import load_tokenizer
from kvrail.text.bounds import longest_text

COMPOSED = "\u03b1\u0313\u0300\u0345"  # NFC makes one character of these four


def byte_level(normalizer=None) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "aa": 1, "aaaa": 2}, merges=[("a", "a"), ("aa", "aa")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.normalizer = normalizer
    return backend


def test_no_text_has_fewer_ids_than_its_length_says(folder):
    tokenizer = load_tokenizer(str(folder))
    longest = tokenizer.longest_text
    if longest is None:
        pytest.skip("this tokenizer's texts have no bound")
    words = [token for token in (tokenizer.token_text(i) for i in range(tokenizer.vocab_size)) if token]
    most = max(words, key=len)
    rng = random.Random(3)
    for text in (most * 50, most, COMPOSED * 40, "".join(rng.choices(words, k=200)), " " * 300, "\u00e9" * 99):
        assert len(tokenizer.encode(text, False)) * longest >= len(text), text[:50]


@pytest.mark.parametrize(
    ("normalizer", "bound"),
    [
        (None, 4),
        (normalizers.NFC(), 16),
        (normalizers.Sequence([normalizers.Prepend("_"), normalizers.Replace(" ", "_")]), 4),
        (normalizers.Replace("  ", " "), None),
        (normalizers.Strip(), None),
        (normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()]), None),
    ],
)
def test_normalizers_that_shorten_texts_are_known_or_end_the_bound(normalizer, bound):
    assert longest_text(byte_level(normalizer), {"type": "BPE"}) == bound


def test_what_makes_one_token_of_any_number_of_characters_ends_the_bound():
    assert longest_text(byte_level(), {"type": "Unigram"}) is None
    assert longest_text(byte_level(), {"type": "BPE", "unk_token": "<unk>", "fuse_unk": True}) is None
    assert longest_text(byte_level(), {"type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True})
    greedy = byte_level()
    greedy.add_special_tokens([AddedToken("<end>", lstrip=True)])
    assert longest_text(greedy, {"type": "BPE"}) is None


def test_too_many_ids_are_refused_and_by_length_unread(folders, monkeypatch):
    tokenizer = load_tokenizer(str(folders["qwen"]))
    ids = tokenizer.encode("the dog", False)
    assert tokenizer.encode("the dog", False, len(ids)) == ids
    with pytest.raises(ContextLengthError, match=f"{len(ids) - 1} tokens are the most, and the text has {len(ids)}"):
        tokenizer.encode("the dog", False, len(ids) - 1)
    monkeypatch.setattr(tokenizer, "_backend", None)
    text = "x" * (5 * tokenizer.longest_text + 1)
    with pytest.raises(ContextLengthError, match=f"no text of {len(text)} characters"):
        tokenizer.encode(text, False, 5)
