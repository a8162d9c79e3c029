"""Move KV pages between two engines, compressed and checked: docs/embedding.md.

An engine of its own needs nothing else of kvrail: it names its pools of torch tensors, and carries a few control
messages from one end to the other by whatever channel it has. kvrail's own workers send and receive by the same
`PageSender` and `PageReceiver`, with gRPC for the control messages.

    endpoint = await KVEndpoint.start(layout, KVPools.by_layer(kv_caches), host="10.0.0.7")
    receiving = endpoint.receive("request-1", pages=[4, 9, 2], host="10.0.0.8")  # its `offer` goes to the sender
    sending = endpoint.send(offer, pages=[7, 0, 3], control=channel.write)       # there; `control` feeds `deliver` here
"""

from kvrail.kv.endpoint import KVEndpoint
from kvrail.kv.pools import KVPools
from kvrail.kv.receiving import Receiving
from kvrail.kv.sending import Sending
from kvrail.values.layout import KVLayout

__all__ = ["KVEndpoint", "KVLayout", "KVPools", "Receiving", "Sending"]
