"""Pages of four or eight bits a value: lossy, within half a step, at fixed places."""
