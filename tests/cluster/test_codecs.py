"""Every codec on the wire: pages arrive bit for bit, and what does not fit is refused by name."""

import re

import pytest
import torch

import kvrail.services.decode.choice
import kvrail.transfer.route
from kvrail.codec import registry
from kvrail.codec.splitzip.one_stage.codebook import Codebook, default_codebook
from kvrail.config.settings import DecodeSettings
from kvrail.errors import ConfigError, InvalidRequestError, TransferAbortedError
from kvrail.transfer.sizes import MAX_GROWTH_BYTES
from kvrail.values.layout import DTYPE_BYTES
from kvrail.values.pagehash import page_hashes
from kvrail.worker.codecs import Codecs
from tests.cluster.cluster import TRANSPORTS, cluster, settings
from tests.cluster.staged import on_send, with_payload
from tests.cluster.test_equality import prompt_of
from tests.cluster.test_faults import note_pages
from tests.models import tiny_model

NAMES = [name for name in registry.names() if registry.get(name).exact]
ALL = [(name, dtype) for dtype in DTYPE_BYTES for name in NAMES if dtype in registry.get(name).dtypes]
PAIRS = [(name, dtype) for number, (name, dtype) in enumerate(ALL) if dtype == "bfloat16" or number % 3 == 0]
"""Every codec with pages of bfloat16, every other type with a codec or two; tests/codec has each with each."""
CASES = [(*pair, ("inproc", "tcp")[number % 2]) for number, pair in enumerate(PAIRS)]
PAGE = 16
PROMPTS = (prompt_of(65), prompt_of(500), prompt_of(500)[:230] + prompt_of(700, seed=1))  # the last hits a prefix
SHARED = {"page_size": PAGE, "max_batch_tokens": 256, "max_frame_bytes": 1 << 15}


TOKENS = {}


async def never_sent(dtype):
    """Tokens of each prompt where the decode worker computes it itself."""
    if dtype not in TOKENS:
        async with cluster(tiny_model("llama"), kv_dtype=dtype, prefix_cache=False, **SHARED) as c:
            TOKENS[dtype] = [(await c.ask(prompt, local=True)).tokens for prompt in PROMPTS]
    return TOKENS[dtype]


def content(worker, prompt, space=""):
    """Bits of the full pages of a prompt, in order, of each of the pool's tensors."""
    pages = worker.engine._scheduler.pool.match(page_hashes(prompt, PAGE, space=space))
    return [pool[:, pages].view(torch.uint8) for pool in worker.access.cache.as_block()]


def metric(worker, name, codec, **labels):
    labels = {"model_name": worker.settings.model_name, "codec": codec, **labels}
    return worker.monitor.registry.get_sample_value(name, labels)


@pytest.mark.parametrize(("name", "dtype", "transport"), CASES)
async def test_pages_arrive_bit_for_bit_and_give_the_same_tokens(name, dtype, transport):
    tokens = await never_sent(dtype)
    async with cluster(tiny_model("llama"), transport, kv_dtype=dtype, **SHARED) as c:
        (prefill,) = c.prefills.values()
        for number, prompt in enumerate(PROMPTS):
            answer = await c.ask(prompt, codec=name)
            assert answer.tokens == tokens[number]
            assert answer.summary.codec == name and answer.summary.prefill_worker
            assert answer.summary.cached_tokens == (224 if number == 2 else 0)
            theirs, ours = content(prefill, prompt), content(c.decode, prompt)
            assert ours[0].shape[1] == len(prompt) // PAGE
            assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))
        await c.settled()
        check_metrics(c.decode, prefill, name, dtype)


def check_metrics(decode, prefill, name, dtype):
    """Both ends counted the same, and the prefill worker what it encoded."""
    frames = metric(prefill, "kvrail_kv_frames_total", name, direction="sent")
    assert frames == metric(decode, "kvrail_kv_frames_total", name, direction="received") > 3
    blocks = frames / registry.get(name).num_stages
    assert metric(prefill, "kvrail_kv_encode_seconds_count", name) == blocks
    assert metric(decode, "kvrail_kv_decode_seconds_count", name) == frames
    assert (
        metric(prefill, "kvrail_kv_encode_seconds_sum", name) > 0 < metric(decode, "kvrail_kv_decode_seconds_sum", name)
    )
    raw, payload = (
        metric(prefill, f"kvrail_kv_{kind}_bytes_total", name, direction="sent") for kind in ("raw", "payload")
    )
    assert 0 < payload <= raw + frames * MAX_GROWTH_BYTES
    values = metric(prefill, "kvrail_kv_encoded_values_total", name)
    scales = raw - values * DTYPE_BYTES[dtype]
    assert scales == (values / 16 * 4 if DTYPE_BYTES[dtype] == 1 else 0)  # one a token and head of 16
    escapes, raw_tensors = (
        metric(prefill, f"kvrail_kv_{kind}_total", name) for kind in ("escaped_values", "raw_tensors")
    )
    assert 0 <= escapes <= values
    if name == "raw":
        assert (payload, escapes, raw_tensors) == (raw, 0, 2 * blocks)
    elif dtype == "bfloat16":
        most = 0.85 if name.startswith("splitzip") else 1.0  # the KV of random weights is no more regular for lynx
        assert payload < most * raw and raw_tensors < blocks


def cut(payload):
    """The last byte is missing."""
    return payload[:-1]


def other_header(payload):
    """A bit of the first byte is another."""
    wrong = bytearray(payload)
    wrong[0] ^= 1
    return memoryview(wrong)


@pytest.mark.parametrize("name", NAMES)
async def test_a_payload_that_is_wrong_in_itself_touches_no_page(monkeypatch, caplog, name):
    """The frame's checksum holds: the sender framed what its codec never made."""
    async with cluster(tiny_model("llama"), kv_dtype="bfloat16", prefix_cache=False, **SHARED) as c:
        for fault in (cut, other_header) if name != "raw" else (cut,):  # raw payloads have no header

            async def faulty(sender, header, stage, fault=fault):
                return with_payload(stage, fault(stage.payload), sealed=True)

            caplog.clear()
            before = c.decode.access.cache.tensors["keys"].clone()
            pages = note_pages(monkeypatch, c.decode)
            on_send(monkeypatch, faulty)
            answer = await c.ask(PROMPTS[1], codec=name)
            assert answer.tokens == (await never_sent("bfloat16"))[1] and not answer.summary.prefill_worker
            assert re.search(r"request r\d+: .*(payload|stage)", caplog.text)
            assert len(pages) == 1 and pages[0].equal(before)
            await c.settled()
            monkeypatch.undo()
        assert (await c.ask(PROMPTS[1], codec=name)).tokens == (await never_sent("bfloat16"))[1]
        await c.settled()


async def test_each_request_may_choose_its_codec():
    async with cluster(tiny_model("llama"), kv_dtype="bfloat16", prefix_cache=False, **SHARED) as c:
        answers = {name: await c.ask(PROMPTS[1], codec=name) for name in ("", *NAMES)}
        assert answers[""].summary.codec == "splitzip-channel"
        assert {name: answer.summary.codec for name, answer in answers.items() if name} == {n: n for n in NAMES}
        assert len({answer.summary.kv_raw_bytes for answer in answers.values()}) == 1
        assert answers["splitzip-channel"].summary.kv_bytes < answers["splitzip"].summary.kv_bytes
        assert answers["splitzip"].summary.kv_bytes < answers["raw"].summary.kv_bytes
        await c.settled()


async def test_a_codec_that_does_not_take_the_pages_is_refused():
    async with cluster(tiny_model("llama"), kv_dtype="float32", **SHARED) as c:
        assert (await c.ask(PROMPTS[0])).summary.codec == "raw"  # chosen, since the default codec takes no float32
        with pytest.raises(InvalidRequestError, match=r"'splitzip' takes .*bfloat16.*float32; choose one of raw") as e:
            await c.ask(PROMPTS[0], codec="splitzip")
        assert e.value.param == "codec"
        await c.settled()


@pytest.mark.parametrize(
    ("setting", "dtype", "words"),
    [
        ("splitzip", "float32", r"--codec: codec 'splitzip' takes .*but the KV pages are float32; choose one of raw, "),
        ("zip", "bfloat16", r"--codec: codec 'zip' is unknown; choose one of raw, splitzip"),
    ],
)
def test_a_setting_that_cannot_work_is_an_error_at_start(setting, dtype, words):
    options = settings(DecodeSettings, tiny_model("llama"), codec=setting, kv_dtype=dtype)
    with pytest.raises(ConfigError, match=words):
        Codecs(options, allow_lossy=False).check(options.codec)


@pytest.mark.parametrize(("dtype", "usual"), [("bfloat16", "splitzip-channel"), ("float32", "raw")])
def test_what_is_asked_for_of_an_unknown_link_follows_the_pages(dtype, usual):
    codecs = Codecs(settings(DecodeSettings, tiny_model("llama"), kv_dtype=dtype), allow_lossy=False)
    assert codecs.check(DecodeSettings().codec) == "auto"
    assert codecs.usual == usual


def codebook(tmp_path, name="book.json", **changes):
    """The shipped codebook with the window of bfloat16 keys one lower, as a file."""
    book = default_codebook().model_copy(deep=True)
    document = book.model_dump(mode="json")
    document["dtypes"]["bfloat16"]["keys"]["tops"][0] -= 1
    changed = Codebook.model_validate({**document, **changes}, strict=False)
    changed.save(tmp_path / name)
    return changed, str(tmp_path / name)


async def test_both_ends_need_the_same_codebook(tmp_path, caplog):
    book, path = codebook(tmp_path)
    both = rf"splitzip' differ: decode worker {default_codebook().id:016x}, prefill worker {book.id:016x}; .*--codebook"
    async with cluster(tiny_model("llama"), kv_dtype="bfloat16", prefill={"codebook": path}, **SHARED) as c:
        answer = await c.ask(PROMPTS[1], codec="splitzip")
        assert not answer.summary.prefill_worker and re.search(both, caplog.text)
        assert (await c.ask(PROMPTS[1])).summary.codec == "splitzip-channel"  # which has no codebook
        await c.settled()
    async with cluster(tiny_model("llama"), kv_dtype="bfloat16", codebook=path, **SHARED) as c:
        answer = await c.ask(PROMPTS[1], codec="splitzip")
        assert answer.tokens == (await c.ask(PROMPTS[1], local=True)).tokens
        await c.settled()


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        (
            {"model_fingerprint": "ab" * 32},
            {},
            r"fingerprint (ab){32}, but the model here has [0-9a-f]{64}; calibrate",
        ),
        ({}, {"kv_dtype": "float32"}, "book.json: .*not for float32"),
    ],
)
async def test_a_codebook_that_does_not_fit_is_an_error_at_start(tmp_path, changes, options, words):
    _, path = codebook(tmp_path, **changes)
    with pytest.raises(ConfigError, match=words):
        async with cluster(tiny_model("llama"), **{"kv_dtype": "bfloat16", "codebook": path, **options}):
            pass


def test_a_codebook_that_cannot_be_read_is_an_error_at_start(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.json: .*name a readable file"):
        options = settings(
            DecodeSettings, tiny_model("llama"), kv_dtype="bfloat16", codebook=str(tmp_path / "nowhere.json")
        )
        Codecs(options, allow_lossy=False)


@pytest.mark.parametrize("name", ["raw", "splitzip-channel"])
async def test_frames_carry_nothing_of_other_requests(monkeypatch, name):
    """Slots behind the prompt's end keep what was there before; it does not leave the worker."""
    payloads = []

    async def keeping(sender, header, stage):
        payloads.append(bytes(stage.payload))

    on_send(monkeypatch, keeping)
    one_page = {**SHARED, "max_frame_bytes": 2 * PAGE * 2 * 16 * 2}  # so that frames do not depend on time
    prompts = (prompt_of(250), prompt_of(300), prompt_of(250))  # of 20 pages, 16, 19 and 16 are used
    async with cluster(
        tiny_model("llama"), kv_dtype="bfloat16", prefix_cache=False, prefill={"num_pages": 20}, **one_page
    ) as c:
        sent = []
        for prompt in prompts:
            answer = await c.ask(prompt, codec=name)
            sent.append((sorted(payloads), answer.summary.kv_bytes))
            payloads.clear()
        await c.settled()
    assert len(sent[0][0]) == 3 * 16 and sent[0] == sent[2]


@pytest.mark.parametrize("decode_bytes", [1 << 14, 1 << 20])
async def test_frames_are_sized_by_the_link_and_by_what_both_ends_take(monkeypatch, decode_bytes):
    monkeypatch.setattr(kvrail.services.decode.choice.Chooser, "link_bytes_per_s", lambda *_: 1234)
    told = []
    sized = kvrail.transfer.route.frame_bytes
    monkeypatch.setattr(kvrail.transfer.route, "frame_bytes", lambda *given: told.append(given) or sized(*given))
    async with cluster(tiny_model("llama"), "tcp", decode={"max_frame_bytes": decode_bytes}, **SHARED) as c:
        answer = await c.ask(prompt_of(300), max_tokens=2)
    assert answer.summary.prefill_worker
    assert told == [(1234, min(decode_bytes, SHARED["max_frame_bytes"]), 1)]


@pytest.mark.parametrize("codec", ["raw", "int8"])
async def test_an_answer_of_one_token_says_who_computed_it_and_how_its_kv_crosses(codec):
    """The request ends with the first token, before its KV is here."""
    async with cluster(tiny_model("llama"), "tcp", decode={"allow_lossy": True}, **SHARED) as c:
        answer = await c.ask(prompt_of(300), max_tokens=1, codec=codec)
        (address,), summary = c.prefills, answer.summary
        assert (summary.prefill_worker, summary.codec, summary.transport) == (address, codec, "tcp")
        assert summary.lossy == (codec == "int8")
        assert summary.numerics == ("" if summary.lossy else c.decode.model.numerics)
        assert summary.completion_tokens == 1
        longer = await c.ask(prompt_of(200), max_tokens=5, codec=codec)
        assert [reply.lossy for reply in (*answer.news, *longer.news)] == [codec == "int8"] * 6
        await c.settled()


async def test_where_a_prefill_worker_fails_behind_its_first_token_the_answer_names_none(monkeypatch):
    async def fail(sender, header, stage):
        raise TransferAbortedError("broken on purpose")

    on_send(monkeypatch, fail)
    async with cluster(tiny_model("llama"), "tcp", **SHARED) as c:
        summary = (await c.ask(prompt_of(300), codec="raw")).summary
        assert (summary.prefill_worker, summary.codec, summary.transport, summary.kv_bytes) == ("", "", "", 0)
        await c.settled()


@pytest.mark.parametrize("transport", TRANSPORTS[1:])
async def test_a_transfer_of_one_frame_tells_the_link(monkeypatch, transport):
    """It comes ahead of the first token, as all frames of a short prompt do."""
    for least in ("LEAST_SAMPLE_BYTES", "LEAST_PAYLOAD_BYTES"):
        monkeypatch.setattr(kvrail.services.decode.choice, least, 1000)
    async with cluster(tiny_model("llama"), transport, page_size=PAGE) as c:
        (address,) = c.prefills
        rate = {"model_name": c.decode.settings.model_name, "prefill_worker": address}
        assert c.decode.monitor.registry.get_sample_value("kvrail_kv_link_bytes_per_second", rate) is None
        for asked in range(1, 11):
            summary = (await c.ask(prompt_of(300, asked), codec="raw")).summary
            assert metric(c.decode, "kvrail_kv_frames_total", "raw", direction="received") == asked
            known = c.decode.monitor.registry.get_sample_value("kvrail_kv_link_bytes_per_second", rate)
            if known is not None:
                break  # a frame that is here before it is asked for tells nothing
        assert known >= summary.kv_bytes / transfer_seconds(c.decode)
        await c.settled()


def transfer_seconds(worker):
    """Of all transfers that a decode worker has received, handshakes and computation included."""
    labels = {"model_name": worker.settings.model_name, "direction": "received"}
    return worker.monitor.registry.get_sample_value("kvrail_kv_transfer_seconds_sum", labels)


@pytest.fixture
def uncompiled(monkeypatch):
    """(role, codec) pairs that are not compiled, which a test may change; and those that were asked for."""
    missing, asked = set(), []

    def key(codecs, name):
        return "prefill" if codecs._allow_lossy else "decode", name

    def ask_for(codecs, name):
        asked.append(key(codecs, name))
        return "is being compiled" if key(codecs, name) in missing else ""

    monkeypatch.setattr(Codecs, "usable", lambda codecs, name: key(codecs, name) not in missing)
    monkeypatch.setattr(Codecs, "ask_for", ask_for)
    return missing, asked


@pytest.mark.parametrize(
    ("roles", "reason"),
    [
        (["decode"], "codec splitzip is being compiled on the decode worker"),
        (["prefill"], "codec splitzip is not compiled on the prefill worker yet"),
        (["decode", "prefill"], "codec splitzip is being compiled on the decode worker"),
    ],
)
async def test_a_codec_that_is_not_compiled_is_asked_for_at_both_ends_and_another_serves(uncompiled, roles, reason):
    missing, asked = uncompiled
    missing |= {(role, "splitzip") for role in roles}
    async with cluster(tiny_model("llama"), kv_dtype="bfloat16", prefix_cache=False, **SHARED) as c:
        first = await c.ask(PROMPTS[1], codec="splitzip")
        assert (first.summary.codec, first.summary.codec_reason) == ("splitzip-channel", reason)
        assert first.tokens == (await never_sent("bfloat16"))[1]
        assert {("decode", "splitzip"), ("prefill", "splitzip")} <= set(asked)
        assert metric(c.decode, "kvrail_kv_codec_substituted_total", "splitzip") == 1
        missing.clear()
        then = await c.ask(PROMPTS[1], codec="splitzip")
        assert (then.summary.codec, then.summary.codec_reason) == ("splitzip", "")
        assert metric(c.decode, "kvrail_kv_codec_substituted_total", "splitzip") == 1
        await c.settled()


async def test_plain_bytes_serve_where_nothing_else_is_compiled(uncompiled):
    missing, _ = uncompiled
    missing |= {("prefill", name) for name in registry.names() if name != "raw"}
    async with cluster(
        tiny_model("llama"), "tcp", kv_dtype="bfloat16", decode={"codec": "int8", "allow_lossy": True}, **SHARED
    ) as c:
        summary = (await c.ask(PROMPTS[1])).summary
        assert (summary.codec, summary.lossy) == ("raw", False) and "int8" in summary.codec_reason
        await c.settled()
