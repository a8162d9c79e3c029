"""Join the weight pieces of a run and write the model folder's configuration.

python3 assemble.py --run OUT_FOLDER --model MODEL_FOLDER
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from model import Shape
from tokenizer import END_OF_TEXT, END_OF_TURN, PAD
from tokenizers import Tokenizer


def main() -> None:
    """Write model.safetensors, config.json and generation_config.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    args = parser.parse_args()
    pieces = sorted(args.run.glob("model.safetensors.*"), key=lambda p: int(p.suffix[1:]))
    (args.model / "model.safetensors").write_bytes(b"".join(p.read_bytes() for p in pieces))
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    numbers = tokenizer.get_vocab()
    turn, text, pad = numbers[END_OF_TURN], numbers[END_OF_TEXT], numbers[PAD]
    config = Shape().config(turn, text, pad)
    generation = {"bos_token_id": text, "eos_token_id": [turn, text], "pad_token_id": pad,
                  "do_sample": True, "temperature": 0.2, "max_new_tokens": 256}  # fmt: skip
    for name, content in (("config", config), ("generation_config", generation)):
        (args.model / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
