import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrail.errors import IncompatibleError, InvalidRequestError
from kvrail.layout import DTYPE_BYTES, KVLayout
from kvrail.lifecycle import Stage
from kvrail.sampling import FinishReason, SamplingParams, TokenLogprobs
from kvrail.wire import convert
from kvrail.wire.v1 import common_pb2, decode_pb2

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


def test_sampling_from_the_network_is_checked():
    message = convert.sampling_to_proto(SamplingParams(max_tokens=10))
    message.top_p = math.nan
    with pytest.raises(InvalidRequestError) as caught:
        convert.sampling_from_proto(message)
    assert caught.value.param == "top_p"
    with pytest.raises(InvalidRequestError):
        convert.sampling_from_proto(common_pb2.SamplingParams())


@given(st.floats(width=32, allow_nan=False), st.lists(st.tuples(uint32, st.floats(width=32, allow_nan=False))))
def test_logprobs_round_trip(logprob, top):
    logprobs = TokenLogprobs(logprob, tuple(top))
    assert convert.logprobs_from_proto(convert.logprobs_to_proto(logprobs)) == logprobs


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
    marks = [(stage, index / 3) for index, stage in enumerate(Stage)]
    assert convert.marks_from_proto(convert.marks_to_proto(marks)) == marks


@pytest.mark.parametrize(
    ("stage", "seconds"),
    [("lunch", 1.0), ("", 0.0), ("received", -1.0), ("received", math.nan), ("received", math.inf)],
)
def test_wrong_mark_is_refused(stage, seconds):
    with pytest.raises(IncompatibleError):
        convert.marks_from_proto([common_pb2.Mark(stage=stage, seconds=seconds)])


@pytest.mark.parametrize("reason", [None, *FinishReason])
def test_finish_reason_round_trip(reason):
    assert convert.finish_reason_from_proto(convert.finish_reason_to_proto(reason)) is reason


def test_unknown_finish_reason_is_refused():
    message = decode_pb2.GenerateReply.FromString(b"\x28\x63")  # field 5, value 99: open enums let it in
    with pytest.raises(IncompatibleError, match="99"):
        convert.finish_reason_from_proto(message.finish_reason)
