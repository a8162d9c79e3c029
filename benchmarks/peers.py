"""Other engines in the same process, for comparison."""

import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from kvrail.engine.model.loader import LoadedModel


def generate_batch_seconds(
    folder: Path, loaded: LoadedModel, prompts: list[list[int]], lengths: list[int]
) -> list[float]:
    """Seconds that transformers' continuous batching takes for `prompts`, greedy, for each number of new tokens.

    Random weights of the same shape; its own defaults but for the share of memory it may take. The best of two rounds
    after one that warms it up.
    """
    config = AutoConfig.from_pretrained(folder)
    with torch.device(loaded.device):
        model = AutoModelForCausalLM.from_config(config, dtype=loaded.dtype, attn_implementation="sdpa").eval()
    batching = ContinuousBatchingConfig(max_memory_percent=0.5)
    return [min(_rounds(model, batching, prompts, length)[1:]) for length in lengths]


def _rounds(model: Any, batching: ContinuousBatchingConfig, prompts: list[list[int]], new_tokens: int) -> list[float]:
    generation = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        outputs = model.generate_batch(
            prompts, generation_config=generation, continuous_batching_config=batching, persistent_manager=True
        )
        seconds.append(time.perf_counter() - begin)
        made = sum(len(output.generated_tokens) for output in outputs.values())
        if made != len(prompts) * new_tokens:
            raise RuntimeError(f"generate_batch made {made} tokens instead of {len(prompts) * new_tokens}")
    return seconds
