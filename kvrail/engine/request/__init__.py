"""What the engine is asked for, what a request has become, and what its caller is told."""
