"""Measures what codecs of KV cost a model on a user's own text."""
