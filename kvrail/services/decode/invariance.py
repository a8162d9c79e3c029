"""Whether a request's tokens have the bits that any worker would give them, whatever is computed beside them."""

import logging

logger = logging.getLogger("kvrail.decode")


class InvarianceTracker:
    """What this worker may say of the bits of its output; own: its numerics (kvrail.engine.step.invariance)."""

    def __init__(self, own: str) -> None:
        self._own = own
        self._mixed = False
        self._warned: set[str] = set()

    def received(self, prefill_worker: str, numerics: str) -> None:
        """KV has come that was computed with these numerics; from now on the prefix cache may hold some of it."""
        if numerics == self._own:
            return
        self._mixed = True
        if self._own and prefill_worker not in self._warned:
            self._warned.add(prefill_worker)
            logger.warning(
                "prefill worker %s computes other bits (numerics %s, here %s), so that tokens may differ with where a"
                " prompt is computed; run the same GPUs, versions and settings on both",
                prefill_worker,
                numerics or "none",
                self._own,
            )

    def of(self, prefill_numerics: str | None, cached_tokens: int) -> str:
        """Numerics of a whole request; empty where something of it was computed otherwise, or may have been.

        prefill_numerics: of the worker that computed the prompt; None: this one did.
        """
        if prefill_numerics not in (None, self._own) or (self._mixed and cached_tokens):
            return ""
        return self._own
