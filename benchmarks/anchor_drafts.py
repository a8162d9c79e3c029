"""Drafting on coarse KV: texts, exact continuations of the demo model, and how many drafts an anchor gets accepted.

A draft is accepted while it equals the exact continuation, and up to there both have the same inputs. So one forward
pass of the exact continuation over the coarse KV shows how many drafts would be accepted.
"""

import itertools
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

DEMO = Path(__file__).parents[1] / "models" / "kvrail-demo"
LENGTHS = (768, 1280)
DRAFTS = 64
BATCH = 12
"""Contexts of a forward pass at most."""
UNSEEN = (
    *(f"torch/nn/modules/{name}.py" for name in ("conv", "loss", "transformer")),
    *(f"torch/{name}.py" for name in ("optim/adam", "utils/data/dataloader", "distributed/distributed_c10d")),
    *(f"transformers/{name}.py" for name in ("generation/logits_process", "trainer", "cache_utils")),
    *(f"huggingface_hub/{name}.py" for name in ("hf_api", "file_download")),
)
"""Files of installed packages, full of documentation, that are not among the demo model's sources."""


@dataclass
class Memory:
    """KV of one layer, float32 [contexts, kv_heads, room, dim], `used` of it filled; each a bfloat16 number."""

    keys: torch.Tensor
    values: torch.Tensor
    used: int

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store [contexts, kv_heads, tokens, dim], rounded as a page would; gives all that is stored."""
        end = self.used + keys.shape[2]
        self.keys[:, :, self.used : end] = keys.bfloat16()
        self.values[:, :, self.used : end] = values.bfloat16()
        self.used = end
        return self.keys[:, :, :end], self.values[:, :, :end]


@dataclass(frozen=True)
class Group:
    """Contexts of equal length with their exact KV and greedy continuation.

    keys, values: bfloat16 [layers, contexts, tokens, kv_heads, dim]; tokens: int64 [contexts, 1 + DRAFTS]; the
    prefill worker sends the first one.
    """

    keys: torch.Tensor
    values: torch.Tensor
    tokens: torch.Tensor


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    memory: Sequence[Memory],
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention over what `memory` holds and the new tokens; see transformers' AttentionInterface."""
    keys, values = memory[module.layer_idx].append(key, value)
    queries, held = query.shape[2], keys.shape[2]
    mask = torch.ones(queries, held, dtype=torch.bool).tril(held - queries)
    out = torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


class Model:
    """The demo model in float32 arithmetic over KV of bfloat16."""

    def __init__(self) -> None:
        AttentionInterface.register("anchor_study", _attend)
        self._model = AutoModelForCausalLM.from_pretrained(
            DEMO, dtype=torch.float32, attn_implementation="anchor_study"
        ).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(DEMO)
        self.vocabulary = self._model.config.vocab_size
        self.outputs: list[torch.Tensor] = []
        for layer in self._model.model.layers:
            layer.self_attn.register_forward_hook(lambda module, inputs, output: self.outputs.append(output[0]))

    def memory(self, contexts: int, room: int) -> list[Memory]:
        """Empty, for every layer."""
        config = self._model.config
        shape = (contexts, config.num_key_value_heads, room, config.head_dim)
        return [Memory(torch.empty(shape), torch.empty(shape), 0) for _ in range(config.num_hidden_layers)]

    @torch.inference_mode()
    def forward(self, tokens: torch.Tensor, memory: Sequence[Memory], last: int) -> torch.Tensor:
        """Logits [contexts, last, vocabulary] of the last tokens; tokens: int64 [contexts, tokens], stored in `memory`.

        Leaves the output of each attention layer, [contexts, tokens, hidden], in `outputs`.
        """
        self.outputs.clear()
        start = memory[0].used
        positions = torch.arange(start, start + tokens.shape[1])[None].expand_as(tokens)
        return self._model(
            input_ids=tokens, position_ids=positions, use_cache=False, memory=memory, logits_to_keep=last
        ).logits


def windows(model: Model, lengths: Sequence[int] = LENGTHS) -> dict[int, torch.Tensor]:
    """By length, int64 [contexts, length]: heldout.txt and UNSEEN, where they are as long, each at another place.

    Raises SystemExit where none is.
    """
    packages = Path(sysconfig.get_path("purelib"))
    paths = [DEMO / "heldout.txt", *(packages / name for name in UNSEEN)]
    found: dict[int, list[list[int]]] = {length: [] for length in lengths}
    for path in paths:
        tokens = model.tokenizer(path.read_text(encoding="utf-8"), verbose=False)["input_ids"]
        for number, length in enumerate(lengths):
            start = (number + 1) * (len(tokens) - length) // (len(lengths) + 1)
            if start >= 0:
                found[length].append(tokens[start : start + length])
    for length, rows in found.items():
        if not rows:
            raise SystemExit(f"no text that the demo model has not seen has {length} tokens; ask for fewer")
    return {length: torch.tensor(rows) for length, rows in found.items()}


def continued(model: Model, rows: torch.Tensor) -> Group:
    """The exact cache and continuation of contexts, int64 [contexts, length]."""
    contexts, length = rows.shape
    memory = model.memory(contexts, length + DRAFTS)
    logits = model.forward(rows, memory, 1)
    keys, values = (
        torch.stack([getattr(layer, kind)[:, :, :length].transpose(1, 2).bfloat16() for layer in memory])
        for kind in ("keys", "values")
    )
    tokens = [logits[:, -1].argmax(-1, keepdim=True)]
    for _ in range(DRAFTS):
        tokens.append(model.forward(tokens[-1], memory, 1)[:, -1].argmax(-1, keepdim=True))
    return Group(keys, values, torch.cat(tokens, 1))


def verified(model: Model, group: Group, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Drafts accepted of each context, int64 [contexts]; leaves attention's outputs in `model.outputs`."""
    memory = model.memory(keys.shape[1], keys.shape[2] + DRAFTS)
    for layer, key, value in zip(memory, keys, values, strict=True):
        layer.append(key.transpose(1, 2), value.transpose(1, 2))
    drafts = model.forward(group.tokens[:, :-1], memory, DRAFTS).argmax(-1)
    return (drafts == group.tokens[:, 1:]).long().cumprod(1).sum(1)


def groups(model: Model) -> list[Group]:
    """Every context, in batches."""
    rows = itertools.chain.from_iterable(each.split(BATCH) for each in windows(model).values())
    return [continued(model, each) for each in rows]


def attention_outputs(model: Model) -> torch.Tensor:
    """[layers, contexts, drafts, hidden] of the last pass."""
    return torch.stack(model.outputs)


def exact_outputs(model: Model, groups: Sequence[Group]) -> list[torch.Tensor]:
    """Attention's outputs with the exact cache."""
    found = []
    for group in groups:
        verified(model, group, group.keys, group.values)
        found.append(attention_outputs(model))
    return found
