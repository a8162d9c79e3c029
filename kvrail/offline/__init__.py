"""Offline use: the router's reading of requests over a worker's engine, in the caller's process."""
