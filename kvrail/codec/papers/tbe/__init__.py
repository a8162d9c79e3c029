"""Weights as TCA-TBE, in 11.3 bits; see README.md beside this."""
