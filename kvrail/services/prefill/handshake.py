"""What the two ends of a transfer must agree on before any payload."""

from dataclasses import dataclass

from kvrail.codec.base import Codec
from kvrail.config.origins import flag_name
from kvrail.errors import IncompatibleError, InvalidRequestError, WorkerUnavailableError
from kvrail.transfer.route import Route, first_common
from kvrail.transport.base import Peer
from kvrail.wire import PROTOCOL_VERSION
from kvrail.wire.convert import check_request_id, layout_from_proto
from kvrail.wire.v1 import prefill_pb2
from kvrail.worker.codecs import Codecs
from kvrail.worker.status import ServedModel
from kvrail.worker.transports import Transports


@dataclass(frozen=True, slots=True)
class Terms:
    """What a prefill worker can agree to."""

    model: ServedModel
    codecs: Codecs
    transports: Transports

    def agree(self, request: prefill_pb2.PrefillRequest, host: str) -> tuple[Route, prefill_pb2.Accepted]:
        """How a transfer goes, and the reply that says so. host: the receiver's, as its call came from it.

        Raises IncompatibleError where the two ends differ, naming both values.
        """
        check_request_id(request.request_id)
        theirs, model = request.handshake, self.model.loaded
        _same("protocol version", theirs.protocol_version, PROTOCOL_VERSION)
        _same("model fingerprint", theirs.model_fingerprint, model.fingerprint)
        layout = layout_from_proto(theirs.layout)
        for field in ("num_layers", "num_kv_heads", "key_dim", "value_dim", "page_size", "dtype"):
            _same(f"KV layout ({field})", getattr(layout, field), getattr(model.layout, field))
        codec = _agree_on_codec(self.codecs, theirs)
        offered = {each.name: each for each in theirs.transports}
        transport = self.transports.get(first_common("transport", list(offered), self.transports.names))
        peer_transport = offered[transport.name]
        page_count = model.layout.pages_for(len(request.prompt_token_ids)) - theirs.held_pages
        if page_count < 1:
            raise InvalidRequestError(
                f"the receiver holds {theirs.held_pages} pages, the whole prompt of {len(request.prompt_token_ids)}"
                " tokens",
                param="handshake.held_pages",
            )
        accepted = prefill_pb2.Accepted(
            protocol_version=PROTOCOL_VERSION,
            codec=codec.name,
            transport=transport.name,
            first_page=theirs.held_pages,
            page_count=page_count,
            transport_address=transport.address,
            numerics=self.model.numerics,
        )
        peer = Peer(peer_transport.address, host)
        route = Route.to(peer, theirs.transfer_key, codec, transport, on_device=peer_transport.on_device)
        return route, accepted


def _same(what: str, theirs: object, ours: object) -> None:
    if theirs != ours:
        raise IncompatibleError(
            f"{what} differs: decode worker {theirs!r}, prefill worker {ours!r}; run the same version, model and"
            " settings on both"
        )


def _agree_on_codec(codecs: Codecs, theirs: prefill_pb2.Handshake) -> Codec:
    """The first that is offered and usable here. What is offered and not compiled here is compiled from now on."""
    offered = {codec.name: codec.parameters_id for codec in theirs.codecs}
    first_common("codec", list(offered), list(codecs.names))
    obstacles = {name: codecs.ask_for(name) for name in offered if name in codecs.names}
    for name, obstacle in obstacles.items():
        ours = codecs.get(name).parameters_id
        if offered[name] != ours:
            raise IncompatibleError(
                f"parameters of codec {name!r} differ: decode worker {offered[name]:016x}, prefill worker"
                f" {ours:016x}; run both with the same {flag_name('codebook')} file"
            )
        if not obstacle:
            return codecs.get(name)
    reasons = "; ".join(f"codec {name} {obstacle}" for name, obstacle in obstacles.items())
    raise WorkerUnavailableError(f"{reasons} on this prefill worker, and nothing else was offered; offer raw too")
