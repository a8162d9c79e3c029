"""Weights in 11.3 bits, multiplied as they lie; see README.md beside this."""
