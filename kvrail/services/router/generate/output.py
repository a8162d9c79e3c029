"""A worker's replies for one prompt, checked, as updates of its choices."""

from dataclasses import replace

from kvrail.errors import IncompatibleError
from kvrail.services.router.plan.translate import Plan
from kvrail.services.router.values import Delta, Drafted, Ended, Scored, Settled
from kvrail.values.sampling import PromptLogprobs
from kvrail.wire.checks import check_drafts, check_number, check_output, check_summary
from kvrail.wire.convert import (
    finish_reason_from_proto,
    marks_from_proto,
    output_logprobs_from_proto,
    prompt_logprobs_from_proto,
    spans_from_proto,
)
from kvrail.wire.v1 import decode_pb2


class PromptOutput:
    """How far the output of one prompt has come. The request is kept up to date, so that another worker can continue.

    drafts: of each choice that has any, as they count if all are wrong. unfinished: choices that have not ended.
    new_tokens: of all choices, since the reader last set it to 0. ended: the worker's summary.
    Every method raises IncompatibleError for a reply that breaks the protocol.
    """

    def __init__(self, request: decode_pb2.GenerateRequest, first_index: int, plan: Plan) -> None:
        """first_index: of the prompt's first choice in the response."""
        self._silent, self._special_stops = plan.silent, plan.special_stops
        self._request = request
        self._first_index = first_index
        self._n = request.sampling.n
        self._unscored = len(request.prompt_token_ids) - 1 if request.sampling.HasField("prompt_logprobs") else 0
        self._vocab_size = 0
        self.drafts: dict[int, Settled] = {}
        self.unfinished = set(range(first_index, first_index + self._n))
        self.new_tokens = 0
        self.ended: Ended | None = None

    def start(self, vocab_size: int) -> None:
        """A worker starts the output, or continues it."""
        self._vocab_size = vocab_size
        self.ended = None

    def end(self, summary: decode_pb2.GenerateSummary, offset: float) -> None:
        """The worker's summary; offset: seconds from DISPATCHED to its zero."""
        if self.ended is not None:
            raise IncompatibleError("the decode worker sent a second summary")
        sampling = self._request.sampling
        check_summary(summary, len(self._request.prompt_token_ids), self._n * sampling.max_tokens)
        self.ended = Ended(summary, offset, marks_from_proto(summary.marks), spans_from_proto(summary.spans))

    def scored(self, message: decode_pb2.PromptLogprobs) -> list[Scored]:
        """Log probabilities of the prompt, one entry for each choice."""
        found, done = prompt_logprobs_from_proto(message, self._vocab_size), self._request.scored_tokens
        top, count = self._request.sampling.prompt_logprobs, len(found.logprobs)
        if found.first != done + 1 or count > self._unscored or found.top != top:
            raise IncompatibleError(
                f"the decode worker sent log probabilities of {count} tokens from {found.first} on, with {found.top} "
                f"likely ones each; expected are {self._unscored} from {done + 1} on, with {top}"
            )
        self._request.scored_tokens = done + count
        self._unscored -= count
        return self._for_all_choices(found)

    def nothing_scored(self) -> list[Scored]:
        """What a prompt of one token has: it follows nothing."""
        return self._for_all_choices(PromptLogprobs(1, (), ()))

    def _for_all_choices(self, found: PromptLogprobs) -> list[Scored]:
        return [Scored(self._first_index + i, found) for i in range(self._n)]

    def draft(self, reply: decode_pb2.GenerateReply) -> Drafted | Settled:
        """Drafts of a choice, or what became of them."""
        index, drafted, verified = self._index(reply), reply.drafted, reply.verified
        check_drafts(reply, self._request, self._vocab_size)
        if reply.HasField("verified"):
            self.drafts.pop(index, None)
            return Settled(index, verified.position, verified.proposed, verified.accepted)
        before = self.drafts.get(index, Settled(index, drafted.position, 0, 0))
        self.drafts[index] = replace(before, proposed=before.proposed + len(drafted.token_ids))
        return Drafted(index, drafted.position, drafted.token_ids, drafted.text)

    def delta(self, reply: decode_pb2.GenerateReply) -> Delta:
        """The reply's output, which is also kept in the request."""
        index, sampling = self._index(reply), self._request.sampling
        check_output(reply, sampling, self._vocab_size)
        if index not in self.unfinished:
            raise IncompatibleError(f"the decode worker sent output of sequence {reply.index}, which has ended")
        self.new_tokens += len(reply.token_ids)
        # A protobuf list is slow to iterate over: one that is mostly empty, or that has no reader, is left as it is.
        token_ids, logprobs = reply.token_ids, reply.logprobs
        finish_reason = finish_reason_from_proto(reply.finish_reason) if reply.finish_reason else None
        if self._unscored:
            raise IncompatibleError(
                f"the decode worker sent output before the log probabilities of {self._unscored} of the prompt's tokens"
            )
        if not self._request.resumed:
            self._request.resumed.extend(decode_pb2.Resumed() for _ in range(self._n))
        resumed = self._request.resumed[reply.index]
        resumed.token_ids.extend(token_ids)
        check_number("the number of a sequence's tokens", len(resumed.token_ids), sampling.max_tokens)
        if finish_reason is not None:
            resumed.ended = True
            self.unfinished.discard(index)
        if self._silent:
            return Delta(index, "", (), (), finish_reason, None)
        return Delta(
            index,
            reply.text,
            token_ids,
            output_logprobs_from_proto(logprobs, sampling, self._vocab_size) if logprobs else (),
            finish_reason,
            self._stop_reason(reply.stop_reason) if reply.stop_reason else None,
        )

    def _stop_reason(self, said: str) -> str | int:
        """The stop string, or the token id; for an id that stands for a stop string, that string."""
        if said in self._request.sampling.stop:
            return said
        return self._special_stops.get(int(said), int(said))

    def _index(self, reply: decode_pb2.GenerateReply) -> int:
        if reply.index >= self._n:
            raise IncompatibleError(f"the decode worker sent sequence {reply.index} of a request with n {self._n}")
        return self._first_index + reply.index
