"""The engine: pages, scheduler, runner, attention, sampler. Continuous batching over one model on one device."""
