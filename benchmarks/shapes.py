"""Model folders without weights: the configuration of a known model and a tokenizer of its vocabulary's size.

For benchmarks with `--load-format dummy`: speed depends on shapes, not on what the weights say.
"""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SHAPES: dict[str, dict[str, object]] = {
    "qwen3-8b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-06,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "eos_token_id": 151645,
        "torch_dtype": "bfloat16",
    },
    "qwen3-32b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-06,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "eos_token_id": 151645,
        "torch_dtype": "bfloat16",
    },
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-05,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "eos_token_id": 128009,
        "torch_dtype": "bfloat16",
    },
}


def weight_bytes(name: str) -> int:
    """Size of the matrices of shape `name` in bfloat16."""
    layers, hidden, inner, heads, kv_heads, dim, vocabulary = (
        int(str(SHAPES[name][key]))
        for key in (
            "num_hidden_layers",
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "vocab_size",
        )
    )
    return 2 * hidden * (layers * (2 * dim * (heads + kv_heads) + 3 * inner) + 2 * vocabulary)


def write_shape(name: str, folder: Path) -> Path:
    """Write the model folder of shape `name` into `folder`; returns it."""
    config = SHAPES[name]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    size = int(str(config["vocab_size"]))
    vocabulary = {token: number for number, token in enumerate(alphabet)}
    vocabulary |= {f"Ġw{number}": number for number in range(len(alphabet), size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def card_of(name: str) -> str:
    """A word for a GPU, for names of results: "h100" for "NVIDIA H100 80GB HBM3"."""
    return name.removeprefix("NVIDIA ").split()[0].lower()
