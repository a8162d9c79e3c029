"""Checks from outside its thread that an engine makes progress."""

import asyncio
from time import monotonic

from kvrail.engine.engine import Engine

LOOK_EVERY_S = 0.5
STALLED_S = 30.0
"""Longest time without a step while requests wait for one and no transfer holds pages. Nothing justifies any."""


async def broken(engine: Engine, step_timeout_s: float) -> str:
    """Wait until the engine has given up, a step hangs, or no step is taken though requests wait; returns which."""
    steps, since = engine.steps, monotonic()
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        if not engine.alive:
            return "the engine has given up; see the errors above"
        running_s = engine.step_seconds
        if running_s > step_timeout_s:
            return f"a step has not ended within {step_timeout_s:g} s: the device hangs"
        if engine.steps != steps or running_s > LOOK_EVERY_S or not engine.owes_a_step():
            steps, since = engine.steps, monotonic()
        elif monotonic() - since > STALLED_S:
            now = engine.status()
            return f"{now.waiting} sequences wait and {now.running} run, but for {STALLED_S:g} s no step was taken"
