"""Train the byte-level BPE tokenizer and write it with its chat template.

python3 tokenizer.py --work SCRATCH_FOLDER --out MODEL_FOLDER
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 8192
END_OF_TEXT, START_OF_TURN, END_OF_TURN, PAD = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>",
)  # fmt: skip
SPECIAL = [END_OF_TEXT, START_OF_TURN, END_OF_TURN, PAD]
SPLIT = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,2}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def train(texts: list[str]) -> Tokenizer:
    """A byte-level BPE tokenizer whose first tokens are the special ones."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=24,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def sample(corpus: Path, share: float) -> list[str]:
    """A share of the corpus' training documents, in pieces of at most 20 KB."""
    chance = random.Random(1)
    texts: list[str] = []
    with corpus.open() as lines:
        for line in lines:
            document = json.loads(line)
            text = document["text"]
            if not document["heldout"]:
                pieces = range(0, len(text), 20_000)
                texts.extend(text[i : i + 20_000] for i in pieces if chance.random() < share)
    return texts


def chat_sample(questions: Path, share: float) -> list[str]:
    """A share of the training conversations, so that the roles become tokens of their own."""
    chance = random.Random(2)
    texts: list[str] = []
    with questions.open() as lines:
        for line in lines:
            row = json.loads(line)
            if not row["heldout"] and chance.random() < share:
                texts.append("".join(f"{m['role']}\n{m['content']}\n" for m in row["messages"]))
    return texts


def write_config(folder: Path, positions: int) -> None:
    """Write tokenizer_config.json: special tokens, context length and chat template."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": positions,
        "eos_token": END_OF_TURN,
        "pad_token": PAD,
        "bos_token": None,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "additional_special_tokens": [END_OF_TEXT, START_OF_TURN],
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--share", type=float, default=0.2)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    texts = sample(args.work / "corpus.jsonl", args.share)
    tokenizer = train([*texts, *chat_sample(args.work / "questions.jsonl", args.share)])
    if tokenizer.token_to_id("assistant") is None:
        raise SystemExit("the role names are not single tokens")
    tokenizer.save(str(args.out / "tokenizer.json"))
    write_config(args.out, 8192)
    check = texts[:200]
    count = sum(len(e.ids) for e in tokenizer.encode_batch(check))
    size = sum(len(t.encode()) for t in check)
    print(f"{tokenizer.get_vocab_size()} tokens, {size / count:.2f} bytes per token")
    print(f"for train.py: --assistant {tokenizer.token_to_id('assistant')}")


if __name__ == "__main__":
    main()
