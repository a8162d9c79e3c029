"""Paged attention: a reference, a CPU path, CUDA kernels, and their place in transformers' attention registry."""
