"""Offline use: a model in the caller's process, which reads requests as the router does and runs a worker's engine."""
