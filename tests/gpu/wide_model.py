"""Two layers as wide as an 8B model's; run with a folder, it compiles them and says the numerics."""

import sys
from pathlib import Path

from transformers import Qwen3Config

from kvrail.engine.model.loader import LoadedModel, load_model
from kvrail.engine.step.runner import ModelRunner


def wide_model(folder: Path) -> LoadedModel:
    """Random weights from a fixed seed. cuBLAS would split products of few rows; norms are sums of several blocks."""
    Qwen3Config(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=2,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=2048,
        max_position_embeddings=4096,
    ).save_pretrained(folder)
    return load_model(str(folder), device="cuda", dtype="auto", kv_dtype="bfloat16", page_size=16, load_format="dummy")


if __name__ == "__main__":
    runner = ModelRunner(wide_model(Path(sys.argv[1])), 200, max_running=16, max_batch_tokens=512)
    runner.warm_up()
    sys.stdout.write(runner.finding.numerics)
