"""The command `kvrail`."""
