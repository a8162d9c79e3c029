"""The whole server as it ships, on a GPU: many architectures and settings, each under a crowd of unlike requests."""
