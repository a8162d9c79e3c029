"""From a request to token ids, sampling parameters, a grammar, and how to read the output."""
