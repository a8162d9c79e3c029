"""Muon for the matrices of the layers, Adam for everything else."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def orthogonalise(stack: Tensor, steps: int = 5) -> Tensor:
    """Bring the singular values of each matrix near one (Newton-Schulz, in bfloat16)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = stack.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = x.mT if tall else x
    return result


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised; matrices of one shape are handled in one stack."""

    def __init__(self, params: list[nn.Parameter], lr: float, decay: float) -> None:
        shapes = sorted({tuple(p.shape) for p in params})
        groups = [{"params": [p for p in params if tuple(p.shape) == s]} for s in shapes]
        super().__init__(groups, {"lr": lr, "decay": decay, "momentum": 0.95})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update."""
        for group in self.param_groups:
            params = group["params"]
            grads = [p.grad for p in params]
            state = self.state[params[0]]
            if "momentum" not in state:
                state["momentum"] = [torch.zeros_like(p) for p in params]
            buffers, momentum, lr = state["momentum"], group["momentum"], group["lr"]
            torch._foreach_lerp_(buffers, grads, 1 - momentum)
            mixed = torch.stack(torch._foreach_lerp(grads, buffers, momentum))
            update = orthogonalise(mixed)
            scale = max(1.0, mixed.shape[-2] / mixed.shape[-1]) ** 0.5
            torch._foreach_mul_(params, 1 - lr * group["decay"])
            changes = [u.to(p.dtype) for u, p in zip(update.unbind(), params, strict=True)]
            torch._foreach_add_(params, changes, alpha=-lr * scale)


def make(model: nn.Module, muon_lr: float, adam_lr: float, decay: float, fused: bool) -> list[torch.optim.Optimizer]:
    """Both optimizers for a decoder."""
    named = list(model.named_parameters())
    matrices = [p for n, p in named if p.ndim == 2 and "embed" not in n]
    embeddings = [p for n, p in named if "embed" in n]
    scales = [p for n, p in named if p.ndim == 1]
    adam = torch.optim.AdamW(
        [{"params": embeddings, "weight_decay": 0.01}, {"params": scales, "weight_decay": 0.0}],
        lr=adam_lr, betas=(0.9, 0.95), eps=1e-10, fused=fused,
    )  # fmt: skip
    return [Muon(matrices, muon_lr, decay), adam]
