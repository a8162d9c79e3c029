"""How a layer turns products of queries and keys into weights."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class ScoreOptions:
    """What models ask of attention besides causality.

    scale: factor of the products. window: each query sees its last `window` tokens, itself included; 0: all. softcap:
    scores become softcap * tanh(score / softcap); 0: off. sinks: [heads], one score a head that takes part in the
    softmax and attends to nothing; None: off.
    """

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
