"""What a peer says of itself and of a request's output is checked before anything is made of it."""

import math

import pytest

from kvrail.errors import IncompatibleError
from kvrail.wire import PROTOCOL_VERSION, checks
from kvrail.wire.v1 import common_pb2, decode_pb2

MODEL = common_pb2.ModelInfo(name="m", fingerprint="f" * 64, vocab_size=100, max_model_len=512)
SAMPLING = common_pb2.SamplingParams(max_tokens=10, n=2, stop=["end"], stop_token_ids=[7])


def status(**changes):
    fields = {"model": MODEL, "protocol_version": PROTOCOL_VERSION, "pages_total": 10, "pages_free": 4}
    fields["kv_cache"] = "plain"
    return common_pb2.WorkerStatus(**fields | changes)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"model": common_pb2.ModelInfo(name="m", vocab_size=100)}, "max_model_len is 0"),
        ({"model": common_pb2.ModelInfo(name="m", max_model_len=100)}, "vocab_size is 0"),
        ({"model": common_pb2.ModelInfo(name="a\nb", vocab_size=1, max_model_len=1)}, "the model is"),
        ({"codecs": ["x" * 300]}, "one of codecs"),
        ({"codecs": ["x"] * 1025}, "number of codecs is 1025"),
        ({"pages_cached": 7}, "free and cached pages is 11"),
        ({"kv_cache": ""}, "keeps KV pages as ''; known forms are plain, lossless, int8, int4, kvcomp, rot3"),
        ({"kv_cache": "int3"}, "keeps KV pages as 'int3'; known"),
        ({"kv_cache": "int4", "roles": ["prefill"]}, "only prefills and keeps KV pages as 'int4'"),
        ({"metrics_port": 65536}, "metrics_port is 65536"),
        ({"step_cost": common_pb2.StepCost(prefill_each=math.nan)}, "prefill_each is nan"),
        ({"step_cost": common_pb2.StepCost(decode_base=-1.0)}, "decode_base is -1"),
        ({"kv_events": common_pb2.KVEvents(stored=[1, 2], removed=[3])}, "digests of pages is 3"),
        ({"report": common_pb2.WorkerReport(link_bytes_per_s={"p:1": math.inf})}, "rate of a link is inf"),
        ({"report": common_pb2.WorkerReport(link_bytes_per_s={"\x1b[2J": 1.0})}, "links in the report"),
    ],
)
def test_a_status_that_cannot_be_is_refused(changes, what):
    checks.check_status(status(), 2)
    with pytest.raises(IncompatibleError, match=what):
        checks.check_status(status(**changes), 2)


def test_workers_that_decode_may_keep_lossy_pages():
    for roles in (["decode"], ["prefill", "decode"]):
        checks.check_status(status(kv_cache="int4", roles=roles), 2)


def test_a_worker_of_another_protocol_may_leave_things_out():
    checks.check_status(common_pb2.WorkerStatus(protocol_version=PROTOCOL_VERSION + 1), 0)


@pytest.mark.parametrize(
    ("reply", "what"),
    [
        ({"token_ids": [3, 100]}, "token id 100"),
        ({"logprobs": [common_pb2.TokenLogprobs()]}, "log probabilities is 1"),
        ({"stop_reason": "8", "finish_reason": 1}, "'8' ended"),
        ({"stop_reason": "²", "finish_reason": 1}, "'²' ended"),
        ({"stop_reason": "7"}, "goes on"),
    ],
)
def test_output_that_cannot_be_is_refused(reply, what):
    for reason in ("end", "7", ""):
        said = decode_pb2.GenerateReply(token_ids=[99], finish_reason=1, stop_reason=reason)
        checks.check_output(said, SAMPLING, 100)
    with pytest.raises(IncompatibleError, match=what):
        checks.check_output(decode_pb2.GenerateReply(**reply), SAMPLING, 100)


@pytest.mark.parametrize(
    ("reply", "what"),
    [
        ({"drafted": decode_pb2.Drafted(token_ids=[100])}, "token id 100"),
        ({"drafted": decode_pb2.Drafted(position=9, token_ids=[1, 2])}, "end of drafts is 11"),
        ({"verified": decode_pb2.Verified(position=4, proposed=7)}, "verified drafts is 11"),
        ({"verified": decode_pb2.Verified(proposed=1, accepted=2)}, "accepted drafts is 2"),
    ],
)
def test_drafts_that_cannot_be_are_refused(reply, what):
    asked = decode_pb2.GenerateRequest(provisional=True, sampling=SAMPLING)
    good = decode_pb2.Drafted(position=8, token_ids=[1, 2])
    checks.check_drafts(decode_pb2.GenerateReply(drafted=good), asked, 100)
    with pytest.raises(IncompatibleError, match=what):
        checks.check_drafts(decode_pb2.GenerateReply(**reply), asked, 100)
    with pytest.raises(IncompatibleError, match="not asked for"):
        checks.check_drafts(decode_pb2.GenerateReply(drafted=good), decode_pb2.GenerateRequest(sampling=SAMPLING), 100)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"prompt_tokens": 6}, "prompt_tokens is 6"),
        ({"completion_tokens": 21}, "completion_tokens is 21"),
        ({"cached_tokens": 26}, "cached_tokens is 26"),
        ({"drafts_accepted": 1}, "drafts_accepted is 1"),
        ({"exposed_s": math.nan}, "exposed_s is nan"),
        ({"codec_reason": "x" * 300}, "codec_reason"),
        ({"local_reason": "x" * 300}, "local_reason"),
        ({"prefill_worker": "p:1\nERROR forged"}, "prefill_worker"),
    ],
)
def test_a_summary_that_cannot_be_is_refused(changes, what):
    fields = {"prompt_tokens": 5, "completion_tokens": 20, "cached_tokens": 25}
    checks.check_summary(decode_pb2.GenerateSummary(**fields), 5, 20)
    with pytest.raises(IncompatibleError, match=what):
        checks.check_summary(decode_pb2.GenerateSummary(**fields | changes), 5, 20)
