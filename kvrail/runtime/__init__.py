"""How a process lives and ends: event loops, background work, draining, logs, files read again."""
