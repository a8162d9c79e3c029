"""Codecs in the form of their papers, for comparison: chosen by name, never by `auto`, compiled at first use."""
