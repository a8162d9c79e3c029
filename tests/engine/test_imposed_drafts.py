"""The benchmark's decode worker accepts as many drafts as the seed says; the model itself continues behind them."""

import random

import pytest

from benchmarks.imposed_decode import ImposedDrafting
from kvrail.engine.request.events import Verified
from kvrail.values.sampling import FinishReason, SamplingParams
from tests.engine.drafting import DecodeSite, noise
from tests.models import generate, tiny_model

PROMPT = random.Random(5).choices(range(256), k=70)
LENGTH = 75


@pytest.mark.parametrize(("made", "imposed"), [(64, 0), (64, 32), (64, 64), (64, 1 << 63), (5, 3), (5, 32)])
def test_the_imposed_drafts_are_output_and_the_rest_is_the_models(
    made: int, imposed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrail.engine.schedule.tracker.Drafting", ImposedDrafting)
    site = DecodeSite()
    params = SamplingParams(max_tokens=LENGTH, temperature=0.0, ignore_eos=True, seed=imposed)
    transfer = site.begin("r", PROMPT, params, provisional=True)
    transfer.send_coarse(noise)
    site.step(made)
    transfer.send_exact()
    site.run()
    accepted = min(made, imposed)
    assert site.of("r", Verified) == [Verified(0, made, accepted)]
    tokens, _, reason, _, count = site.answer("r")
    assert (len(tokens), count, reason) == (LENGTH, LENGTH, FinishReason.LENGTH)
    drafts, _ = site.drafted("r")
    assert tokens[1 : 1 + accepted] == drafts[:accepted]
    given = 1 + accepted
    assert tokens[given:] == generate(str(tiny_model("llama")), (*PROMPT, *tokens[:given]), LENGTH - given)
    assert site.engine.status().pages.used == 0


def test_noise_is_not_accepted_unless_it_is_imposed() -> None:
    site = DecodeSite()
    transfer = site.begin("r", PROMPT, SamplingParams(max_tokens=LENGTH, temperature=0.0, ignore_eos=True, seed=64))
    transfer.send_coarse(noise)
    site.step(64)
    transfer.send_exact()
    site.run()
    assert site.accepted("r") < 32
