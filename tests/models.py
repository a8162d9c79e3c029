"""Tiny random models of several families, saved as folders that the real loading path reads."""

import functools
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from kvrail.values.layout import KVLayout
from tests.scratch import new_folder

VOCAB = 320
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": 256,
}
GEMMA = {"sliding_window": 48, "query_pre_attn_scalar": 16, "tie_word_embeddings": False}
FAMILIES = {
    "llama": (transformers.LlamaConfig, {}),
    "qwen3": (transformers.Qwen3Config, {}),
    "mistral": (transformers.MistralConfig, {"sliding_window": 48}),
    "gemma2": (transformers.Gemma2Config, GEMMA),
    "gemma3": (transformers.Gemma3TextConfig, GEMMA),
}
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def kv_gib(folder: Path, pages: int, kv_dtype: str = "bfloat16", page_size: int = 64) -> float:
    """--kv-memory-gib that gives a worker `pages` pages."""
    config = transformers.AutoConfig.from_pretrained(folder)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = config.num_key_value_heads
    layout = KVLayout(config.num_hidden_layers, heads, head_dim, head_dim, page_size, kv_dtype)
    return (pages + 0.5) * layout.page_bytes / (1 << 30)


def save_tokenizer(folder: Path) -> None:
    """A byte-level BPE with 256 bytes, four special tokens and a few merges: VOCAB ids in all."""
    specials = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(specials), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog " * 9], trainer)
    tokenizer.add_special_tokens(specials)
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>", chat_template=CHAT_TEMPLATE
    )
    wrapped.save_pretrained(folder)


@functools.cache
def tiny_model(family: str, seed: int = 0, **changes: int) -> Path:
    """A folder with a random model of `family` in float32, its tokenizer and its generation configuration."""
    folder = new_folder(family)
    config_class, extra = FAMILIES[family]
    torch.manual_seed(seed)
    config = config_class(**{**COMMON, **extra, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:  # larger weights than the default, so that the choice of token is never a near tie
                parameter.normal_(0.0, 0.6 if "embed" in name or "lm_head" in name else 0.15)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@functools.cache
def reference_model(folder: str) -> transformers.PreTrainedModel:
    """The same model as transformers runs it by itself."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


@functools.cache
def generate(folder: str, prompt: tuple[int, ...], max_new_tokens: int) -> list[int]:
    """Greedy continuation by transformers' own `generate`, without ever stopping early."""
    model = reference_model(folder)
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=max_new_tokens,
            min_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()
