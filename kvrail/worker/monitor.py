"""What a worker's metrics port shows, from the start of its process on. Without torch, whose import takes seconds."""

from typing import TYPE_CHECKING

from kvrail import __version__
from kvrail.config.settings import WorkerSettings
from kvrail.security.tls import Tls
from kvrail.telemetry.exposition import Exposition
from kvrail.telemetry.making import show_certificates, show_process
from kvrail.telemetry.series import Registry
from kvrail.telemetry.startup import Startup
from kvrail.wire import PROTOCOL_VERSION

if TYPE_CHECKING:
    from kvrail.worker.process import Worker


class Monitor:
    """Metrics and health of one worker's process.

    registry: its metrics. startup: how far its start is. port: of the metrics, 0 while none is open.
    """

    def __init__(self, settings: WorkerSettings, tls: Tls | None = None) -> None:
        self.registry = Registry()
        self.startup = Startup(self.registry, settings.model_name, settings.table)
        self.port = 0
        show_process(self.registry, __version__, PROTOCOL_VERSION)
        self._look_at_certificate = show_certificates(self.registry, {} if tls is None else {"services": tls.end})
        self._exposition = Exposition(self.registry, vllm="decode" in settings.roles)
        self._worker: Worker | None = None

    def serves(self, worker: "Worker") -> None:
        """From now on `worker` takes requests, and says how it is."""
        self._worker = worker
        self.startup.end()

    async def render(self, path: str, accept: str = "") -> tuple[bytes, str]:
        """Body and content type of a metrics path. accept: the caller's header."""
        self._look_at_certificate()
        self.startup.tick()
        if (worker := self._worker) is not None:
            self.startup.show(worker.state())
            worker.measure()
        return await self._exposition.answer(path, accept=accept)

    def obstacle(self) -> str:
        """Why requests cannot be sent here; empty where they can."""
        if self._worker is None:
            return f"loading: {self.startup}"
        state = self._worker.state()
        return "" if state == "serving" else f"not serving: {state}"
