"""Calls of a prefill worker: the client, the decode worker's end, the prefill worker's end."""
