"""What the benchmark asks of a cluster, which answers at once here, and of which text."""

from types import SimpleNamespace

import pytest

from benchmarks import progressive
from benchmarks.acceptance import Imposed
from benchmarks.anchor_drafts import DRAFTS
from benchmarks.progressive_client import Trace
from benchmarks.progressive_drafts import FILES, contexts

CODECS = ["raw", "lynx-exact"]
USAGE = {"lossy": False, "kv_bytes": 1, "kv_raw_bytes": 2}


@pytest.fixture
def bench(monkeypatch):
    """One whose cluster is not there; `calls` has the rates and the questions, `made` what drafts come to next."""
    calls, made = [], []

    def ask(url, model, prompt, tokens, codec, *, provisional, seed):
        calls.append((codec, prompt))
        proposed, accepted = made.pop(0) if made else (0, 0)
        usage = {**USAGE, "drafts_proposed": proposed, "drafts_accepted": accepted}
        return Trace("text", [(0.1, 1), (0.2, tokens)], [], usage)

    monkeypatch.setattr(progressive, "ask", ask)
    monkeypatch.setattr(progressive, "limit", lambda spaces, rate: calls.append(rate))
    found = progressive.Bench(SimpleNamespace(url="", model=""), [], CODECS, Imposed())
    found.calls, found.made = calls, made
    return found


def test_every_codec_is_asked_once_before_its_answers_count(bench):
    answers = bench.times("1gbit", [[1], [2]], [3])
    warm, first, second = ([(codec, [prompt]) for codec in CODECS] for prompt in (3, 1, 2))
    computed = [["unlimited", (CODECS[0], [prompt]), "1gbit"] for prompt in (1, 2)]
    assert bench.calls == ["1gbit", *warm, *computed[0], *first, *computed[1], *second]
    bench.calls.clear()
    bench.times("1gbit", [[1], [2]], [3], cold=True)
    assert bench.calls == ["1gbit", *warm, *first, *second]
    assert {codec: len(traces) for codec, traces in answers.items()} == dict.fromkeys(CODECS, 2)


def test_drafts_count_once_all_are_made_or_one_is_wrong(bench):
    bench.made += [(20, 20), (40, 40), (DRAFTS, DRAFTS), (5, 4)]
    found = bench.drafts("10mbit", [[1], [2]], "lynx-exact")
    assert bench.calls == ["10mbit", *[("lynx-exact", [prompt]) for prompt in (1, 1, 1, 2)]]
    assert found.accepted == [DRAFTS, 4] and found.bits == 8
    bench.made += [(20, 20)] * progressive.TRIALS
    with pytest.raises(SystemExit, match="take a slower --drafts-rate than 10mbit"):
        bench.drafts("10mbit", [[1]], "lynx-exact")


def test_every_file_has_a_context_of_each_length():
    lengths = [int(length) for length in progressive.DRAFTS_TOKENS.split(",")]
    found = contexts(lengths)
    assert [len(each) for each in found] == lengths * len(FILES) and len(found) == 24
    assert len({tuple(each) for each in found}) == 24


@pytest.mark.parametrize("shape", ["", "llama-3.1-8b"])
def test_rounds_leave_one_prompt_to_warm_up_with(shape):
    options = progressive.parse(["--rounds", "2", "--shape", shape] if shape else ["--rounds", "2"])
    first, second, extra = progressive.prompts_of(100, options)
    assert len(first) == len(second) == len(extra) == 100 and extra not in (first, second)


def test_more_rounds_than_texts_are_refused():
    options = progressive.parse(["--rounds", str(len(FILES))])
    with pytest.raises(SystemExit, match=f"--rounds {len(FILES)} takes {len(FILES) + 1} texts of 4096 tokens"):
        progressive.prompts_of(4096, options)
