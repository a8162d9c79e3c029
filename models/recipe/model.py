"""The decoder as the training loop runs it: Qwen3's arithmetic, nothing else.

Parameter names are those of transformers' ``Qwen3ForCausalLM``, so a state dict
saved here loads there. ``check_against_transformers`` compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """The sizes of the decoder."""

    vocab: int = 8192
    hidden: int = 512
    inner: int = 960
    layers: int = 8
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    positions: int = 8192
    rope_theta: float = 200_000.0

    def config(self, end_of_turn: int, end_of_text: int, pad: int) -> dict[str, Any]:
        """The config.json for transformers."""
        return {
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
            "vocab_size": self.vocab, "hidden_size": self.hidden,
            "intermediate_size": self.inner, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim, "max_position_embeddings": self.positions,
            "rope_theta": self.rope_theta, "rms_norm_eps": 1e-6, "hidden_act": "silu",
            "attention_bias": False, "attention_dropout": 0.0, "use_sliding_window": False,
            "tie_word_embeddings": True, "initializer_range": 0.02, "use_cache": True,
            "torch_dtype": "bfloat16", "bos_token_id": end_of_text,
            "eos_token_id": end_of_turn, "pad_token_id": pad,
        }  # fmt: skip


class Norm(nn.Module):
    """Root-mean-square normalisation with a learned scale."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension, in float32."""
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
        return (y * self.weight).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embedding to (batch, heads, time, head_dim)."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with normalised queries and keys."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = s.heads, s.kv_heads, s.head_dim
        self.q_proj = nn.Linear(s.hidden, s.heads * s.head_dim, bias=False)
        self.k_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.v_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.heads * s.head_dim, s.hidden, bias=False)
        self.q_norm, self.k_norm = Norm(s.head_dim), Norm(s.head_dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Causal attention over (batch, time, hidden)."""
        b, t, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(b, t, self.heads, self.head_dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(b, t, self.kv_heads, self.head_dim)).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.kv_heads, self.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o_proj(y.transpose(1, 2).reshape(b, t, -1))
        return out


class Gated(nn.Module):
    """The SwiGLU feed-forward layer."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(s.hidden, s.inner, bias=False)
        self.up_proj = nn.Linear(s.hidden, s.inner, bias=False)
        self.down_proj = nn.Linear(s.inner, s.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to (batch, time, hidden)."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(s), Gated(s)
        self.input_layernorm, self.post_attention_layernorm = Norm(s.hidden), Norm(s.hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attention and feed-forward, each on a normalised residual stream."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Body(nn.Module):
    """Embedding, layers and final norm (``model.`` in the state dict)."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(s.vocab, s.hidden)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.layers))
        self.norm = Norm(s.hidden)


class Decoder(nn.Module):
    """The whole decoder with tied input and output embeddings."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.stream = torch.float32  # the type of the residual stream
        self.model = Body(shape)
        half = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        angles = torch.outer(torch.arange(shape.positions).float(), shape.rope_theta**-half)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)
            elif "embed" in name:
                nn.init.normal_(parameter, std=0.02)
            elif parameter.ndim == 2:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)

    def logits(self, tokens: Tensor) -> Tensor:
        """Next-token scores at every position."""
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        x = self.model.embed_tokens(tokens).to(self.stream)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy over the labels that are not -100."""
        scores = self.logits(tokens)
        return F.cross_entropy(scores.float().flatten(0, 1), labels.flatten(), ignore_index=-100)


def check_against_transformers(shape: Shape) -> float:
    """The largest difference between our logits and transformers' on random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    ours = Decoder(shape).eval()
    for parameter in ours.parameters():
        nn.init.normal_(parameter, std=0.05)
    config = {k: v for k, v in shape.config(2, 0, 0).items() if k != "torch_dtype"}
    theirs = Qwen3ForCausalLM(Qwen3Config(**config)).eval().float()
    missing = theirs.load_state_dict(ours.state_dict(), strict=False)
    if missing.unexpected_keys or missing.missing_keys not in ([], ["lm_head.weight"]):
        raise ValueError(f"state dicts differ: {missing}")
    theirs.tie_weights()
    tokens = torch.randint(0, shape.vocab, (2, 100))
    with torch.no_grad():
        gap = (ours.logits(tokens) - theirs(tokens).logits).abs().max()
    return float(gap)
