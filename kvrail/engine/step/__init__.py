"""One step on the device: the runner, captured graphs, the in-flight step, batch invariance."""
