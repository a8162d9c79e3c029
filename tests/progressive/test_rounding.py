"""The judge of bfloat16's answers: what transformers says in bfloat16 passes, a token that does not tie is found."""

import numpy as np
import pytest
import torch

from kvrail.engine.draw import DrawParams, draw_on_cpu
from kvrail.engine.noise import noise_key
from tests.progressive.rounding import Rounding, spacing
from tests.progressive.test_same_output import Tally, prompts

TOKENS = 24


@pytest.fixture(scope="module")
def rounding():
    return Rounding()


@pytest.fixture(scope="module")
def prompt():
    return next(prompts(1))[:300]


@torch.inference_mode()
def at_once(model, prompt, answer):
    """Logits of an answer's tokens from one pass, float32 [tokens, vocabulary]."""
    ids = torch.tensor([[*prompt, *answer[:-1]]])
    return model(ids, logits_to_keep=len(answer)).logits[0].float()


@torch.inference_mode()
def one_at_a_time(model, prompt, choose):
    """An answer whose tokens are computed one after the other, and their logits; choose: from logits at a position."""
    ids, cache, answer, rows = prompt, None, [], []
    for _ in range(TOKENS):
        out = model(torch.tensor([ids]), past_key_values=cache, use_cache=True)
        rows.append(out.logits[0, -1].float())
        answer.append(choose(rows[-1], len(prompt) + len(answer)))
        ids, cache = answer[-1:], out.past_key_values
    return answer, torch.stack(rows)


def greedy(logits, position):
    return int(logits.argmax())


def drawn(logits, position):
    params = DrawParams(0.8, 0, 1.0, -np.inf, noise_key(7, 0, position))
    return draw_on_cpu(logits[None], [params])[0]


@pytest.mark.parametrize("choose, options", [(greedy, {}), (drawn, {"temperature": 0.8, "seed": 7})])
def test_rounding_explains_what_bfloat16_says(rounding, prompt, choose, options):
    exact, rounded = (one_at_a_time(model, prompt, choose)[0] for model in (rounding.exact, rounding.rounded))
    assert rounding.scores(prompt, exact, **options).worst < 1e-3
    assert rounding.scores(prompt, rounded, **options).worst < 1
    other = {"temperature": 0.8, "seed": 8}
    assert rounding.scores(prompt, exact, **other).worst > 1


def test_the_bound_is_about_what_rounding_does(rounding, prompt):
    answer, steps = one_at_a_time(rounding.rounded, prompt, greedy)
    exact, once = (at_once(model, prompt, answer) for model in (rounding.exact, rounding.rounded))
    bound, two = rounding.scores(prompt, answer).bound, exact.topk(2).indices
    for one, other, least in ((steps, exact, 0.05), (once, exact, 0.05), (steps, once, 0)):
        moved = (one - other).gather(1, two).diff()[:, 0].abs()
        assert (moved <= bound).all()
        assert moved.max() >= least * bound.max()


def test_another_token_is_a_tie_only_where_it_all_but_ties(rounding, prompt):
    answer, logits = one_at_a_time(rounding.exact, prompt, greedy)
    best, second = logits.topk(2)[0].T
    places = (best - second).argsort()
    closest, clearest = ([*answer[:place], int(logits[place].topk(2).indices[1])] for place in (places[0], places[-1]))
    tally = Tally(rounding, requests=2)
    for wrong in (closest, clearest):
        tally.judge("greedy", wrong, answer[: len(wrong)], prompt, {})
    (tie,) = tally.ties
    assert tie.place == places[0] and tie.gap == pytest.approx(float((best - second).min()), abs=1e-3)
    (failure,) = tally.differences
    gap = rounding.parting(prompt, clearest, answer[: len(clearest)]).gap
    assert gap == pytest.approx(float((best - second).max()), abs=1e-3) and f"{gap:.3f} apart" in failure
    assert tally.verdict().startswith("2 of 2 answers differ, 1 of them ties")


def test_without_a_judge_every_difference_fails(prompt):
    tally = Tally()
    tally.judge("greedy", [1, 2], [1, 3], prompt, {})
    assert len(tally.differences) == 1 and not tally.ties


def test_spacing_is_that_of_bfloat16():
    sizes = torch.tensor([0.3, 1.0, 1.99, 2.0, 10.6, 127.0], dtype=torch.bfloat16)
    above = torch.nextafter(sizes, torch.full_like(sizes, torch.inf))
    assert torch.equal(spacing(sizes.float()), (above.float() - sizes.float()))
    assert torch.equal(spacing(-sizes.float()), spacing(sizes.float()))
