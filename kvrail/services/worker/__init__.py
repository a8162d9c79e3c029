"""The process of a worker: it prefills, decodes, or does both."""
