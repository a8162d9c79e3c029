"""Measures on a model which exponents its KV cache has, and writes the codebook that SplitZip codes with."""
