import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrail.errors import IncompatibleError, InvalidRequestError
from kvrail.telemetry.moments import Moment
from kvrail.values.layout import DTYPE_BYTES, KVLayout
from kvrail.values.sampling import FinishReason, SamplingParams, TokenLogprobs
from kvrail.wire import convert
from kvrail.wire.v1 import common_pb2, decode_pb2, prefill_pb2

uint32 = st.integers(0, 2**32 - 1)


@st.composite
def sampling_params(draw):
    max_tokens = draw(st.integers(1, 2**32 - 1))
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        temperature=draw(st.floats(0, 100)),
        top_p=draw(st.floats(0, 1, exclude_min=True)),
        top_k=draw(uint32),
        min_p=draw(st.floats(0, 1)),
        repetition_penalty=draw(st.floats(0.01, 100)),
        presence_penalty=draw(st.floats(-2, 2)),
        frequency_penalty=draw(st.floats(-2, 2)),
        logit_bias=draw(st.dictionaries(uint32, st.floats(-100, 100), max_size=4)),
        seed=draw(st.integers(0, 2**64 - 1)),
        logprobs=draw(st.none() | st.integers(0, 20)),
        stop=tuple(draw(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), max_size=4))),
        stop_token_ids=tuple(draw(st.lists(uint32, max_size=4))),
        ignore_eos=draw(st.booleans()),
        include_stop_in_output=draw(st.booleans()),
        skip_special_tokens=draw(st.booleans()),
        n=draw(st.integers(1, 128)),
    )


@given(sampling_params())
def test_sampling_round_trip_is_exact(params):
    wire = convert.sampling_to_proto(params).SerializeToString()
    assert convert.sampling_from_proto(common_pb2.SamplingParams.FromString(wire)) == params


def test_every_sampling_field_crosses():
    fields = {f.name for f in dataclasses.fields(SamplingParams)}
    assert fields == {f.name for f in common_pb2.SamplingParams.DESCRIPTOR.fields}


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 2**32),
        ("min_tokens", 11),
        ("min_tokens", -1),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.0001),
        ("top_p", math.nan),
        ("top_k", -1),
        ("min_p", 1.5),
        ("min_p", math.nan),
        ("temperature", 100.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-46),
        ("repetition_penalty", 1e30),
        ("repetition_penalty", math.inf),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", {-1: 1.0}),
        ("seed", -1),
        ("seed", 2**64),
        ("logprobs", 21),
        ("stop", ("a", "")),
        ("stop_token_ids", (-1,)),
        ("n", 0),
        ("n", 129),
    ],
)
def test_out_of_range_sampling_names_the_parameter(param, value):
    params = dataclasses.replace(SamplingParams(max_tokens=10), **{param: value})
    with pytest.raises(InvalidRequestError, match=param) as caught:
        convert.sampling_to_proto(params)
    assert caught.value.param == param


@pytest.mark.parametrize("workers", [[""], ["x" * 257], ["p:1\nERROR forged"], ["p:1"] * 1025])
def test_prefill_workers_that_a_request_names_are_checked(workers):
    convert.check_workers(["10.0.0.2:7001"] * 1024)
    with pytest.raises(InvalidRequestError, match="prefill"):
        convert.check_workers(workers)


@pytest.mark.parametrize(
    "params", [{"stop": ("x",) * 65}, {"stop": ("x" * 1025,)}, {"stop_token_ids": (1,) * 257}, {"stop": ("",)}]
)
def test_lists_that_are_too_long_are_refused(params):
    with pytest.raises(InvalidRequestError, match="stop"):
        convert.check_sampling(SamplingParams(max_tokens=1, **params))


def test_sampling_from_the_network_is_checked():
    message = convert.sampling_to_proto(SamplingParams(max_tokens=10))
    message.top_p = math.nan
    with pytest.raises(InvalidRequestError) as caught:
        convert.sampling_from_proto(message)
    assert caught.value.param == "top_p"
    with pytest.raises(InvalidRequestError):
        convert.sampling_from_proto(common_pb2.SamplingParams())


logprob_values = st.floats(max_value=0, width=32, allow_nan=False)


@given(logprob_values, st.lists(st.tuples(st.integers(0, 99), logprob_values)))
def test_logprobs_round_trip(logprob, top):
    logprobs = TokenLogprobs(logprob, tuple(top))
    assert convert.logprobs_from_proto(convert.logprobs_to_proto(logprobs), len(top), 100) == logprobs


@pytest.mark.parametrize(
    ("logprobs", "what"),
    [
        (TokenLogprobs(math.nan), "a log probability is nan"),
        (TokenLogprobs(math.inf), "a log probability is inf"),
        (TokenLogprobs(-1.0, ((1, 0.5), (2, -1.0))), "a log probability is 0.5"),
        (TokenLogprobs(-1.0, ((100, -1.0),)), "token id 100"),
        (TokenLogprobs(-1.0, ((1, -1.0),) * 3), "likely tokens is 3"),
    ],
)
def test_wrong_logprobs_are_refused(logprobs, what):
    with pytest.raises(IncompatibleError, match=what):
        convert.logprobs_from_proto(convert.logprobs_to_proto(logprobs), 2, 100)


@pytest.mark.parametrize(
    ("first", "logprobs", "what"),
    [
        (prefill_pb2.FirstToken(token_ids=[1, 100]), None, "token id 100"),
        (prefill_pb2.FirstToken(token_ids=[1]), None, "1 first tokens"),
        (prefill_pb2.FirstToken(token_ids=[1, 2]), 0, "with 0 log probabilities"),
        (prefill_pb2.FirstToken(token_ids=[1, 2], logprobs=[common_pb2.TokenLogprobs()] * 2), None, "with 2 log"),
    ],
)
def test_wrong_first_tokens_are_refused(first, logprobs, what):
    params = SamplingParams(max_tokens=1, n=2, logprobs=logprobs)
    with pytest.raises(IncompatibleError, match=what):
        convert.first_tokens_from_proto(first, params, 100)
    first = prefill_pb2.FirstToken(token_ids=[1, 99])
    assert convert.first_tokens_from_proto(first, SamplingParams(max_tokens=1, n=2), 100) == [(1, None), (99, None)]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"top_ids": [1, 100]}, "token id 100"),
        ({"ranks": [0]}, "rank is 0"),
        ({"ranks": [101]}, "rank is 101"),
        ({"logprobs": [math.nan]}, "nan"),
        ({"top_logprobs": [-1.0, math.nan]}, "nan"),
    ],
)
def test_wrong_logprobs_of_prompts_are_refused(changes, what):
    fields = {"first": 1, "logprobs": [-1.0], "ranks": [1], "top": 2, "top_ids": [1, 2], "top_logprobs": [-1.0, -2.0]}
    convert.prompt_logprobs_from_proto(decode_pb2.PromptLogprobs(**fields), 100)
    with pytest.raises(IncompatibleError, match=what):
        convert.prompt_logprobs_from_proto(decode_pb2.PromptLogprobs(**fields | changes), 100)


@pytest.mark.parametrize(
    "span",
    [
        {"begin": math.nan},
        {"seconds": math.inf},
        {"begin": 1e9},
        {"name": "x" * 300},
        {"process": "a\nERROR forged"},
        {"sizes": {str(number): 1 for number in range(17)}},
    ],
)
def test_wrong_spans_are_refused(span):
    fields = {"process": "p", "track": "t", "name": "n", "begin": 1.0, "seconds": 2.0, "sizes": {"bytes": 3}}
    convert.spans_from_proto([common_pb2.Span(**fields)])
    with pytest.raises(IncompatibleError):
        convert.spans_from_proto([common_pb2.Span(**fields | span)])


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_layout_round_trip(dtype):
    layout = KVLayout(2, 3, 5, 7, 11, dtype)
    assert convert.layout_from_proto(convert.layout_to_proto(layout)) == layout


@pytest.mark.parametrize(
    ("name", "value"), [("num_layers", 0), ("key_dim", 0), ("page_size", 0), ("dtype", "int8"), ("dtype", "")]
)
def test_wrong_layout_is_refused(name, value):
    message = convert.layout_to_proto(KVLayout(2, 3, 5, 7, 11, "bfloat16"))
    setattr(message, name, value)
    with pytest.raises(IncompatibleError, match=name):
        convert.layout_from_proto(message)


def test_marks_round_trip():
    marks = [(moment, index / 3) for index, moment in enumerate(Moment)]
    assert convert.marks_from_proto(convert.marks_to_proto(marks)) == marks


@pytest.mark.parametrize(
    ("moment", "seconds"),
    [
        ("lunch", 1.0),
        ("", 0.0),
        ("received", -1.0),
        ("received", math.nan),
        ("received", math.inf),
        ("received", 1e9),
    ],
)
def test_wrong_mark_is_refused(moment, seconds):
    with pytest.raises(IncompatibleError):
        convert.marks_from_proto([common_pb2.Mark(moment=moment, seconds=seconds)])


@pytest.mark.parametrize("reason", [None, *FinishReason])
def test_finish_reason_round_trip(reason):
    assert convert.finish_reason_from_proto(convert.finish_reason_to_proto(reason)) is reason


def test_unknown_finish_reason_is_refused():
    message = decode_pb2.GenerateReply.FromString(b"\x28\x63")  # field 5, value 99: open enums let it in
    with pytest.raises(IncompatibleError, match="99"):
        convert.finish_reason_from_proto(message.finish_reason)
