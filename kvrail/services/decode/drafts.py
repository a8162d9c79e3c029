"""Where each sequence's output stands, and how many drafts lie beyond it."""

from kvrail.engine.request.events import Drafted, Output, Verified
from kvrail.wire.v1 import decode_pb2


class DraftLog:
    """Follows one request's events in order; positions count the tokens of a sequence's output, from 0.

    resumed: of each sequence, tokens of the output that another worker made.
    """

    def __init__(self, resumed: list[int]) -> None:
        self._verified = resumed
        self._drafted = [0] * len(resumed)
        self.proposed = 0
        self.accepted = 0

    def output(self, event: Output) -> None:
        """Take note of tokens that are certain."""
        self._verified[event.index] += len(event.token_ids)

    def drafted(self, event: Drafted) -> decode_pb2.GenerateReply:
        """Take note of drafts; returns the reply for a client that asked for them."""
        position = self._verified[event.index] + self._drafted[event.index]
        self._drafted[event.index] += len(event.token_ids)
        drafted = decode_pb2.Drafted(position=position, token_ids=event.token_ids, text=event.text)
        return decode_pb2.GenerateReply(index=event.index, drafted=drafted)

    def verified(self, event: Verified) -> decode_pb2.GenerateReply:
        """Take note of the outcome of a sequence's drafts; returns the reply for a client that asked for them."""
        self._drafted[event.index] = 0
        self.proposed += 0 if event.dropped else event.proposed
        self.accepted += event.accepted
        verified = decode_pb2.Verified(
            position=self._verified[event.index], proposed=event.proposed, accepted=event.accepted
        )
        return decode_pb2.GenerateReply(index=event.index, verified=verified)
