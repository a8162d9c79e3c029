"""Uniform quantisation to eight or four bits, in one lossy stage. README.md has the code and the layout."""
