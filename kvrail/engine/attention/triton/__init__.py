"""Attention's Triton kernels for CUDA, and the one order in which they add up."""
