"""Tensors to self-describing bytes and back. Knows no network and no model; imports nothing of ours."""
