"""UCX's settings. Each default that differs from UCX's own gains a factor or prevents a crash: see decision 0016."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class UcxSettings:
    """Settings of one transport. A variable `UCX_…` of the environment overrides these."""

    transports: str = "tcp,cma,self"
    """UCX's transports in host memory. Tags travel over tcp, which notices a peer's death; large payloads within one
    host are read by cma from the sender's memory. Shared-memory queues (posix, sysv) notice nothing: left out."""

    device_transports: str = "cuda_copy,cuda_ipc"
    """Added where the worker is on a CUDA device."""

    rdma_transports: str = "rc,ud"
    """Added, the first, where `rdma` is set."""

    rdma: bool = False
    """Whether this machine has RDMA devices and a UCX that has verbs, which the wheel's has not."""

    segment: str = "256k"
    """TCP's unit of copying. UCX's own 8 KiB reaches a fifth of the rate."""

    spin: bool = False
    """Poll instead of sleeping until something happens: a core for each worker, a shorter way for a payload."""

    peer_failure: bool = True
    """Endpoints notice the death of their peer. Without it the death of a sender within one host can end the receiver:
    cma treats a vanished process as fatal."""

    extra: Mapping[str, str] = field(default_factory=dict)
    """Further variables of UCX, named without `UCX_`."""

    def config(self, *, on_device: bool) -> dict[str, str]:
        """UCX's configuration as its context takes it: names without `UCX_`, less what the environment sets."""
        before, behind = self.rdma_transports if self.rdma else "", self.device_transports if on_device else ""
        transports = ",".join(filter(None, (before, self.transports, behind)))
        config = {
            "TLS": transports,
            "TCP_TX_SEG_SIZE": self.segment,
            "TCP_RX_SEG_SIZE": self.segment,
            # cma is otherwise refused on endpoints that notice failures, as UCX cannot forbid a living peer to read on
            # after this end gave up. Here such a peer gets a stop message, or is cut off and its payload dropped.
            "CMA_MEMORY_INVALIDATE": "y",
            # Above this a payload waits at the sender until its receiver has a region, rather than at the receiver.
            "RNDV_THRESH": "8192",
            "MAX_RNDV_RAILS": "1",
            **self.extra,
        }
        return {name: value for name, value in config.items() if f"UCX_{name}" not in os.environ}
