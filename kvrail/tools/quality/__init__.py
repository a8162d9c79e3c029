"""Measures what codecs of KV and lossy pages cost a model on a user's own text."""
