"""Log probabilities of prompts equal transformers' own, and each is reported once, whatever happens."""

import functools

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvrail.engine.request.events import Admitted, Failed, Output, PromptScored
from kvrail.engine.request.requests import EngineRequest
from kvrail.values.sampling import PromptLogprobs, SamplingParams
from tests.engine.bench import Bench
from tests.engine.drafting import PAGE_SIZE, DecodeSite
from tests.engine.page_machine import VOCAB, expected
from tests.models import tiny_model

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])
TOLERANCE = {"cpu": 2e-5, "cuda": 1e-3}
"""Two orders of summation in float32 over a vocabulary of 320 differ by some 1e-6 on a CPU; a wrong row by 1e-1."""
PROMPT = [(7 * i * i + 3 * i) % 256 for i in range(70)]


@functools.cache
def dense(family: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(tiny_model(family), attn_implementation="eager").eval()


def joined(events: list) -> tuple[list[float], list[int], list[list[tuple[int, float]]]]:
    """Log probabilities, ranks and most likely tokens of all pieces, which follow on one another from token 1."""
    pieces = [event.logprobs for event in events if isinstance(event, PromptScored)]
    logprobs, ranks, tops = [], [], []
    for piece in pieces:
        assert piece.first == 1 + len(logprobs)
        logprobs += piece.logprobs
        ranks += piece.ranks
        tops += [list(piece.most_likely(place)) for place in range(len(piece.logprobs))]
    first = next(i for i, event in enumerate(events) if isinstance(event, Output))
    assert not any(isinstance(event, PromptScored) for event in events[first:])
    return logprobs, ranks, tops


def check(site: DecodeSite, name: str, family: str, prompt: list[int], top: int, device: str = "cpu") -> None:
    atol = TOLERANCE[device]
    logprobs, ranks, tops = joined(site.events[name])
    with torch.no_grad():
        truth = torch.log_softmax(dense(family)(torch.tensor([prompt])).logits[0, :-1], dim=-1)
    targets = torch.tensor(prompt[1:])
    chosen = truth.gather(1, targets[:, None])
    torch.testing.assert_close(torch.tensor(logprobs), chosen[:, 0], rtol=0, atol=atol)
    exact = (1 + (truth > chosen).sum(dim=1)).tolist()
    assert ranks == exact or device != "cpu"
    for row, found in zip(truth, tops, strict=True):
        best = torch.topk(row, top)
        assert device != "cpu" or [token for token, _ in found] == best.indices.tolist()
        torch.testing.assert_close(torch.tensor([v for _, v in found]), best.values, rtol=0, atol=atol)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_equal_transformers_in_any_chunks(family, device):
    site = DecodeSite(family, max_batch_tokens=32, prompt_rows=9, device=device)
    for name, top in (("three", 3), ("none", 0)):
        params = SamplingParams(max_tokens=4, temperature=0.0, prompt_logprobs=top, logprobs=1)
        site.engine.submit(EngineRequest(name, tuple(PROMPT), params))
    site.run()
    for name, top in (("three", 3), ("none", 0)):
        check(site, name, family, PROMPT, top, device)
    assert site.answer("three")[0] == site.answer("none")[0]


def test_what_is_cached_is_computed_again_and_what_was_told_is_not():
    site = DecodeSite()
    plain = SamplingParams(max_tokens=1, temperature=0.0)
    site.engine.submit(EngineRequest("fills the cache", tuple(PROMPT), plain))
    site.run()
    scored = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=2, n=2)
    site.engine.submit(EngineRequest("again", tuple(PROMPT), scored))
    site.run()
    check(site, "again", "llama", PROMPT, 2)
    assert site.of("again", Admitted)[0].cached_tokens == 0
    told = 2 * PAGE_SIZE + 3
    site.engine.submit(EngineRequest("moved", tuple(PROMPT), scored, scored=told))
    site.run()
    pieces = [event.logprobs for event in site.of("moved", PromptScored)]
    assert site.of("moved", Admitted)[0].cached_tokens == 2 * PAGE_SIZE
    whole = [event.logprobs for event in site.of("again", PromptScored)]
    assert pieces[0].first == told + 1
    assert [x for piece in pieces for x in piece.logprobs] == [x for piece in whole for x in piece.logprobs][told:]


def test_only_a_bounded_number_of_rows_is_computed_a_step():
    bench = Bench(num_pages=64, max_batch_tokens=32, prompt_rows=6)
    rows = []
    execute = bench.machine.execute
    bench.machine.execute = lambda slices, *rest: (
        rows.append(sum(s.num_logits for s in slices)) or execute(slices, *rest)
    )
    for name in ("a", "b"):
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        bench.engine.submit(EngineRequest(name, tuple(range(25)), params))
    bench.submit("plain", list(range(25, 50)), max_tokens=1)
    bench.run()
    assert max(rows) <= 6 + 1  # and the row from which `plain` draws
    assert bench.machine.steps[0] == [6, 25]


def test_logits_that_are_no_numbers_fail_the_request_alone():
    bench = Bench(num_pages=64, max_batch_tokens=64)
    execute = bench.machine.execute

    def spoilt(slices, *rest):
        logits = execute(slices, *rest)
        row = 0
        for piece in slices:
            if piece.token_ids[0] == 5 and piece.num_logits > 1:
                logits[row + 1] = float("nan")
            row += piece.num_logits
        return logits

    bench.machine.execute = spoilt
    for name, first in (("bad", 5), ("good", 6)):
        params = SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=0)
        bench.engine.submit(EngineRequest(name, (first, 8, 9), params))
    bench.run()
    assert isinstance(bench.events["bad"][-1], Failed)
    assert bench.tokens("good") == expected([6, 8, 9], 3)


def test_a_row_of_ties_is_ranked_by_id():
    from kvrail.engine.request.sequence import Sequence
    from kvrail.engine.sampling.logprobs import Scores
    from kvrail.engine.schedule.scoring import Scoring

    logits = torch.zeros(1, VOCAB)
    sequence = Sequence("r", 0, SamplingParams(max_tokens=1, prompt_logprobs=2), [4, 7], arrival=1)
    (found,) = Scores(logits, [Scoring(sequence, 1, [7], 0)]).wait()
    assert isinstance(found, PromptLogprobs)
    assert (found.ranks, found.top_ids) == ([8], [0, 1])
