"""Workers that write a given text, or any text that the request's grammar allows."""

import random
from collections.abc import AsyncIterator

from kvrail.grammar import Grammars
from kvrail.wire.v1 import decode_pb2
from tests.router.cluster import Script, summary

STOP, LENGTH = decode_pb2.FINISH_REASON_STOP, decode_pb2.FINISH_REASON_LENGTH


def saying(text: str, piece: int = 3, finish: int = STOP) -> Script:
    """A worker that writes `text`, so many characters at a time."""

    async def script(worker, request) -> AsyncIterator[decode_pb2.GenerateReply]:
        for index in range(request.sampling.n):
            for begin in range(0, len(text), piece):
                yield decode_pb2.GenerateReply(index=index, token_ids=[10], text=text[begin : begin + piece])
            yield decode_pb2.GenerateReply(index=index, token_ids=[256], finish_reason=finish)
        yield decode_pb2.GenerateReply(summary=summary(len(request.prompt_token_ids), len(text) * request.sampling.n))

    return script


async def matching(worker, request) -> AsyncIterator[decode_pb2.GenerateReply]:
    """A worker that draws from what the grammar allows, preferring to end: nonsense that matches."""
    tokenizer, sampling = worker.tokenizer, request.sampling
    grammar = await Grammars(lambda: tokenizer).get(sampling.grammar, "")
    assert grammar is not None, "the request has no grammar"
    for index in range(sampling.n):
        rng = random.Random(sampling.seed + index)
        matcher, tokens, reason = grammar.matcher(), [], LENGTH
        while len(tokens) < sampling.max_tokens:
            mask = int.from_bytes(matcher.state.compute_bitmask(), "little")
            allowed = [token for token in range(tokenizer.vocab_size) if mask >> token & 1]
            closing = [token for token in allowed if tokenizer.token_text(token) in ('"', "}", "]")]
            ending = [token for token in allowed if token in tokenizer.eos_token_ids]
            if ending:
                reason = STOP
                break
            tokens.append(rng.choice(closing if closing and rng.random() < 0.3 else allowed))
            assert matcher.move_to(tokens) == len(tokens)
        text = tokenizer.decode(tokens, skip_special_tokens=sampling.skip_special_tokens)
        for begin in range(0, len(text), 4):
            yield decode_pb2.GenerateReply(index=index, token_ids=[10], text=text[begin : begin + 4])
        yield decode_pb2.GenerateReply(index=index, token_ids=[256], finish_reason=reason)
    yield decode_pb2.GenerateReply(summary=summary(len(request.prompt_token_ids), 1))
