"""How far a worker's start is: the phase that it is in, and the weights that it has loaded."""

from time import perf_counter
from typing import Literal, get_args

from prometheus_client import CollectorRegistry

from kvrail.telemetry.making import Make

Phase = Literal["import", "load", "compile", "capture", "warm_up"]
State = Literal["loading", "serving", "draining", "broken"]


class Startup:
    """The start of one worker, from the opening of its metrics port until it serves. One thread starts it."""

    def __init__(self, registry: CollectorRegistry, model_name: str, role: str) -> None:
        make = Make(registry, model_name)
        states = make.gauge_family(
            "kvrail_process_state",
            "1 for the state that the worker's own process is in, 0 for the others.",
            *("role", "state"),
        )
        self._state = {state: states.labels(model_name, role, state) for state in get_args(State)}
        self._seconds = make.gauges(
            "kvrail_worker_start_seconds",
            "Time of each phase of the start; a phase that is under way grows.",
            "phase",
            get_args(Phase),
        )
        self._bytes = make.gauges(
            "kvrail_worker_load_bytes",
            "Bytes of the model's weights, and how many of them are loaded.",
            "part",
            ("loaded", "total"),
        )
        self._phase: Phase = "import"
        self._before = 0.0  # seconds of this phase, from an earlier time in it
        self._begun: float | None = perf_counter()
        self.show("loading")

    def enter(self, phase: Phase) -> None:
        """End the phase so far; `phase` begins, or goes on."""
        self.tick()
        self._phase, self._before, self._begun = phase, self._seconds[phase].value, perf_counter()

    def loaded(self, done: int, total: int) -> None:
        """Record the bytes of weights that are loaded, and all."""
        self._bytes["total"].set(total)
        self._bytes["loaded"].set(min(done, total))

    def end(self) -> None:
        """The worker serves: the last phase is over."""
        self.tick()
        self._begun = None
        self.show("serving")

    def show(self, state: State) -> None:
        """Record the state of the process."""
        for name, gauge in self._state.items():
            gauge.set(name == state)

    def tick(self) -> None:
        """Bring the present phase's seconds up to date. Any thread may call it."""
        phase, before, begun = self._phase, self._before, self._begun
        if begun is not None:
            self._seconds[phase].set(before + perf_counter() - begun)

    def __str__(self) -> str:
        """What the worker does now, for people."""
        self.tick()
        total = self._bytes["total"].value
        weights = f", {self._bytes['loaded'].value / 1e9:.2f} of {total / 1e9:.2f} GB of weights" if total else ""
        return f"{self._phase.replace('_', ' ')}, {self._seconds[self._phase].value:.0f} s so far{weights}"
