"""How one transfer goes: what the sender chooses from a receiver's offer."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvrail.codec.base import Codec
from kvrail.errors import IncompatibleError
from kvrail.transfer.sizes import MOST_DIRECT_FRAME_BYTES, frame_bytes
from kvrail.transport.base import Peer, Transport


@dataclass(frozen=True, slots=True)
class Route:
    """Codec and transport that both ends have; peer: the receiver's transport. on_device: payloads stay on the GPUs."""

    codec: Codec
    transport: Transport
    peer: Peer
    key: int
    on_device: bool

    @classmethod
    def to(cls, peer: Peer, key: int, codec: Codec, transport: Transport, *, on_device: bool) -> "Route":
        """The route to a receiver; on_device: whether its transport can receive on a CUDA device."""
        return cls(codec, transport, peer, key, on_device and transport.on_device and codec.device_payloads)

    def frame_bytes(self, most: int, link_bytes_per_s: int = 0) -> int:
        """KV that is encoded at once, at most `most`; link_bytes_per_s: 0 if it is not known."""
        if self.on_device:
            return min(MOST_DIRECT_FRAME_BYTES, most)
        return frame_bytes(link_bytes_per_s, most, self.codec.num_stages)


def first_common(what: str, receivers: Sequence[str], senders: Sequence[str]) -> str:
    """The first of the receiver's names that the sender has, too. Raises IncompatibleError if there is none."""
    for name in receivers:
        if name in senders:
            return name
    raise IncompatibleError(f"no common {what}: the receiver has {list(receivers)}, the sender {list(senders)}")
