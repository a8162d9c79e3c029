"""Tensors in fewer bytes by entropy coding of their exponents: weights, checkpoints, deltas between them."""
