"""The wire protocol: generated stubs (`v1`) and their conversion to the project's own types."""

PROTOCOL_VERSION = 9
"""Both ends of a hop must speak the same version; the handshake refuses any other."""
