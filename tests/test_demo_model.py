"""The shipped demo model: its size, its tokenizer and chat template, that it answers and stops."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

FOLDER = Path(__file__).resolve().parents[1] / "models" / "kvrail-demo"
HELD_OUT_LIMIT = 2.6  # the card's loss on heldout.txt plus a margin, in nats per token


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model():
    return transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


def test_size_and_shape():
    assert (FOLDER / "model.safetensors").stat().st_size <= 46_000_000
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["max_position_embeddings"] >= 8192
    assert config["num_attention_heads"] > config["num_key_value_heads"]
    assert config["tie_word_embeddings"]
    assert config["vocab_size"] == 8192


def test_special_tokens_agree(tokenizer):
    config = json.loads((FOLDER / "config.json").read_text())
    generation = json.loads((FOLDER / "generation_config.json").read_text())
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.eos_token_id == config["eos_token_id"]
    assert tokenizer.eos_token_id in generation["eos_token_id"]
    assert tokenizer.pad_token_id == config["pad_token_id"] != tokenizer.eos_token_id
    assert len(tokenizer) == config["vocab_size"]


def test_template_renders_and_round_trips(tokenizer):
    chat = [
        {"role": "system", "content": "Be concise."},
        {"role": "user", "content": "What is grep?"},
        {"role": "assistant", "content": "A command."},
        {"role": "user", "content": "And sed?"},
    ]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe concise.<|im_end|>\n<|im_start|>user\nWhat is grep?<|im_end|>\n"
        "<|im_start|>assistant\nA command.<|im_end|>\n<|im_start|>user\nAnd sed?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = tokenizer.encode(text)
    assert ids.count(tokenizer.eos_token_id) == 4
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_tokenizer_alone_agrees_and_keeps_any_text(tokenizer):
    alone = tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    chance = random.Random(0)
    points = [p for p in range(0x11000) if not 0xD800 <= p < 0xE000]
    texts = ["".join(map(chr, chance.choices(points, k=40))) for _ in range(50)]
    for text in [*texts, "naïve 🎉\t\r\n  x\0", "", "def f(x):\n    return x\n"]:
        ids = alone.encode(text).ids
        assert alone.decode(ids, skip_special_tokens=False) == text
        assert ids == tokenizer.encode(text)


@pytest.mark.parametrize("question", ["What is grep?", "What does tar do?", "What is a process?", "Who are you?"])
def test_answers_end(model, tokenizer, question):
    chat = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = torch.tensor([tokenizer.encode(text)])
    with torch.no_grad():
        out = model.generate(ids, max_new_tokens=200, do_sample=False)[0, ids.shape[1] :]
    assert int(out[-1]) == tokenizer.eos_token_id
    assert len(tokenizer.decode(out, skip_special_tokens=True)) > 20


def test_held_out_loss(model, tokenizer):
    text = (FOLDER / "heldout.txt").read_text()
    ids = torch.tensor([tokenizer.encode(text)])
    with torch.no_grad():
        loss = float(model(ids, labels=ids).loss)
    assert math.isfinite(loss)
    assert loss < HELD_OUT_LIMIT
