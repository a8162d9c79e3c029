"""Chunks of text are written from a template; their bytes are those of the whole object."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrail.services.router.openai.events import MARK, TextEvent, encode_event, is_plain
from kvrail.services.router.openai.formats import ChatWriter, CompletionWriter
from kvrail.services.router.openai.writers import Head
from kvrail.services.router.plan.translate import Plan
from kvrail.services.router.schema import ChatRequest, CompletionRequest
from kvrail.services.router.values import Delta
from kvrail.values.sampling import FinishReason, SamplingParams, TokenLogprobs

HEAD = Head('cmpl-"data"\u2028', 1, "mo\\del", "fp_0")
PLAN = Plan([[1]], [SamplingParams(max_tokens=9, n=3)], [], [""], "", provisional=False, special_stops={})


def writer(api: str, usage: bool):
    """Of three choices."""
    options = {"stream": True, "stream_options": {"include_usage": usage}}
    if api == "chat":
        return ChatWriter(HEAD, None, ChatRequest(messages=[{"role": "user", "content": ""}], **options), PLAN)
    return CompletionWriter(HEAD, None, CompletionRequest(prompt="", **options), PLAN)


@pytest.mark.parametrize("api", ["chat", "completions"])
@pytest.mark.parametrize("usage", [False, True])
@given(texts=st.lists(st.tuples(st.integers(0, 2), st.text(st.characters(exclude_categories=["Cs"]), min_size=1))))
def test_a_text_event_is_the_whole_objects_bytes(api: str, usage: bool, texts: list[tuple[int, str]]):
    written = writer(api, usage)
    build = written.chunk
    events = [TextEvent(build(Delta(index, MARK, (), (), None, None))) for index in range(3)]
    for index, text in texts:
        delta = Delta(index, text, [7], (), None, None)
        assert is_plain(delta)
        event = events[index].encode(text)
        assert event == encode_event(build(delta)) == written.events([delta])
        assert len(event.decode().splitlines()) == 2  # at whatever Python takes for the end of a line
        assert event.isascii()
        assert json.loads(event.removeprefix(b"data: ")) == build(delta)


def test_what_brings_more_than_text_is_not_plain():
    assert not is_plain(Delta(0, "", [7], (), None, None))
    assert not is_plain(Delta(0, "x", [7], (), FinishReason.STOP, None))
    assert not is_plain(Delta(0, "x", [7], [TokenLogprobs(-1.0, ())], None, None))
