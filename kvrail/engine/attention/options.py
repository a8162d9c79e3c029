"""How a layer turns products of queries and keys into attention weights."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class ScoreOptions:
    """What a model asks of attention besides causality.

    scale: factor of the products. window: each query sees its last `window` tokens, itself included; 0: all. softcap:
    scores become softcap * tanh(score / softcap); 0: off. sinks: [heads], one more score a head in the softmax,
    with no value; None: off.
    """

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
