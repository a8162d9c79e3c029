"""One request's KV pages on their way from one worker to another: encoded, announced, carried, checked, decoded.

Sees a source or a sink of pages, a codec, a transport and an observer, and nothing of the engine, the metrics or the
messages of a call; a connector for another engine can use it.
"""
