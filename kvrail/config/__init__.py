"""Every setting of every process, read and checked once at its start."""
