"""Small models of many architectures with random weights, as folders that the real loading path reads."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.models import VOCAB, save_tokenizer

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": 256,
}
_WINDOW = {"sliding_window": 256}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
ARCHITECTURES: dict[str, dict[str, object]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 128},
    "mistral": _WINDOW,
    "gemma": {"head_dim": 128},
    "gemma2": {**_WINDOW, "head_dim": 128, "query_pre_attn_scalar": 128},
    "gemma3_text": {**_WINDOW, "query_pre_attn_scalar": 64},
    "phi3": {"hidden_size": 384, "head_dim": 96},
    "olmo2": {},
    "granite": {},
    "cohere2": _WINDOW,
    "qwen3_moe": {**_EXPERTS, "num_experts": 8},
    "gpt_oss": {**_WINDOW, "num_local_experts": 8, "num_experts_per_tok": 2},
    "deepseek_v3": {
        **_EXPERTS,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "first_k_dense_replace": 1,
    },
}


def write_model(architecture: str, folder: Path) -> Path:
    """Write the model of `architecture` into `folder`, in float32; returns it.

    Weights have a deviation of 0.15, so that every token matters to the next ones.
    """
    options = {**_COMMON, **ARCHITECTURES[architecture]}
    if architecture == "deepseek_v3":
        del options["head_dim"]
    generator = torch.Generator().manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **options)).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder
