"""One step on the device: the runner, captured graphs, the step in flight, batch invariance."""
