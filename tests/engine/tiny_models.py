"""Tiny random models of many architectures, saved as safetensors."""

import functools
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvrail.engine.model.loader import LoadedModel, load_model
from tests.scratch import new_folder

VOCAB = 101
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SERVED = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 24},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
    "mistral": {"sliding_window": 16},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 8},
    "gemma3_text": {"head_dim": 16, "sliding_window": 8},
    "phi3": {},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "olmo2": {},
    "cohere2": {"sliding_window": 8},
    "gpt2": {},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
}
REFUSED = {
    "falcon": ({}, "bypasses"),
    "bloom": ({}, "max_position_embeddings|bypasses"),
    "mamba": ({}, "linear_attention|max_position_embeddings"),
    "llama4_text": ({"head_dim": 16, "num_local_experts": 2}, "chunk"),
    "recurrent_gemma": ({}, "linear_attention|recurrent"),
    "gemma4_text": ({"vocab_size_per_layer_input": VOCAB}, "different KV shapes"),
    "bart": ({}, "encoder-decoder|bypasses"),
    "bert": ({}, "other logits|does not run"),
    "stablelm": ({}, "keyword arguments"),
}


@functools.cache
def folder_of(name: str, **extra: object) -> Path:
    """A folder with a random model: weights of deviation 0.15, so that tokens matter to each other."""
    options = {**_COMMON, **SERVED.get(name, {}), **REFUSED.get(name, ({}, ""))[0], **extra}
    folder = new_folder(name)
    generator = torch.Generator().manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **options)).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
    model.save_pretrained(folder)
    return folder


def load(name: str, **options: object) -> LoadedModel:
    """The tiny model `name`, in float32 on a CPU with pages of 16 tokens unless told otherwise."""
    given = {"device": "cpu", "dtype": "auto", "kv_dtype": "float32", "page_size": 16, "load_format": "safetensors"}
    return load_model(str(folder_of(name)), **{**given, **options})


@functools.cache
def dense_model(name: str) -> torch.nn.Module:
    """The same model under transformers alone, with its own eager attention."""
    return AutoModelForCausalLM.from_pretrained(folder_of(name), attn_implementation="eager").eval()


def dense_logits(name: str, token_ids: list[int]) -> torch.Tensor:
    """Logits of every position of one sequence, [tokens, vocab]."""
    with torch.no_grad():
        return dense_model(name)(torch.tensor([token_ids]), use_cache=False).logits[0]
