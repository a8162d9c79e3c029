"""Packed models: safetensors files whose tensors are coded one by one, and how workers load them."""
