"""One request from admission to its answer, whole or as a stream of events."""
