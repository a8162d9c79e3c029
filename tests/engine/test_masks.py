"""Masks: the same on CPU and GPU, and the same output if steps are enqueued before their tokens are known."""

import asyncio
import ctypes
from functools import partialmethod

import numpy as np
import pytest
import torch

from kvrail.engine.request.events import Failed, Finished
from kvrail.engine.request.requests import EngineRequest
from kvrail.engine.sampling import masks as masks_of_steps
from kvrail.engine.sampling.mask_kernel import mask_on_cuda
from kvrail.engine.sampling.masks import Masks, mask_on_cpu
from kvrail.engine.sampling.sampler import Sampler
from kvrail.engine.step.runner import ModelRunner
from kvrail.errors import InvalidRequestError
from kvrail.grammar import Grammars, texts
from kvrail.values.sampling import SamplingParams
from tests.engine.drafting import DecodeSite, loaded
from tests.engine.test_sampler import random_logits, row

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TEXT = texts.whole(texts.from_schema(SCHEMA, lenient=False))


def random_masks(rows, vocab_size, seed):
    """Masks for two rows in three, and the same as booleans."""
    rng = np.random.default_rng(seed)
    of_rows = np.full(rows, -1, np.int32)
    of_rows[: rows * 2 // 3] = rng.permutation(rows)[: rows * 2 // 3]
    words = rng.integers(-(2**31), 2**31, (rows, -(-vocab_size // 32)), dtype=np.int32)
    plain = [
        [mask < 0 or bool(int(words[mask, i // 32]) >> (i % 32) & 1) for i in range(vocab_size)] for mask in of_rows
    ]
    return Masks(words, of_rows), torch.tensor(plain)


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 500, 513])
def test_masks_forbid_what_their_bits_say(vocab_size):
    masks, plain = random_masks(7, vocab_size, vocab_size)
    logits = random_logits(9, vocab_size + 5)[1:8, :vocab_size]  # rows with a stride of their own
    expected = torch.where(plain, logits, float("-inf"))
    before = logits.clone()
    assert torch.equal(mask_on_cpu(logits, masks), expected)
    assert torch.equal(mask_on_cuda(logits.to(DEVICE), masks, block=128).cpu(), expected)
    assert torch.equal(logits, before)


def test_log_probabilities_are_those_of_all_tokens():
    logits = random_logits(1, 64)
    best = int(logits.argmax())
    words = np.full((1, 2), -1, np.int32)
    words[0, best // 32] ^= np.array(1 << best % 32, np.uint32).view(np.int32)
    masks = Masks(words, np.zeros(1, np.int32))
    (token,) = Sampler(64, torch.device("cpu")).begin(logits, [row(0, temperature=0.0, logprobs=1)], masks).wait()
    assert token.token_id != best and token.logprobs.top[0][0] == best


def compiled(text):
    model, tokenizer = loaded("llama")
    return asyncio.run(Grammars(lambda: tokenizer, model.eos_token_ids).get(text, ""))


def submit(site, name, seed, grammar="", **options):
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=seed, grammar=grammar, **options)
    known = compiled(grammar) if grammar else None
    site.engine.submit(EngineRequest(name, tuple(range(60, 80 + seed)), params, grammar=known))


def test_a_request_whose_grammar_was_not_compiled_is_refused():
    site = DecodeSite()
    with pytest.raises(InvalidRequestError, match="not compiled"):
        site.engine.submit(EngineRequest("r", (1, 2), SamplingParams(max_tokens=4, grammar=TEXT)))


def test_a_grammar_that_leads_nowhere_fails_its_own_request_alone(monkeypatch):
    class Nothing:
        def unsafe_compute_mask_ptr(self, places, where, width, count):
            ctypes.memset(where, 0, width * count)

    site = DecodeSite()
    submit(site, "free", 1)
    submit(site, "stuck", 2, TEXT)
    site.step(3)
    monkeypatch.setattr(site.engine._masks, "_executor", Nothing())
    site.run()
    (failed,) = site.of("stuck", Failed)
    assert site.of("free", Finished) and not site.of("free", Failed)
    assert isinstance(failed.error, InvalidRequestError) and "allows no further" in str(failed.error)


def test_a_grammar_of_another_vocabulary_fails_its_own_request_alone(monkeypatch):
    site = DecodeSite()
    submit(site, "free", 1)
    submit(site, "sound", 2, TEXT)
    monkeypatch.setattr(Grammars, "__init__", partialmethod(Grammars.__init__, vocab_size=5000))
    submit(site, "wrong", 3, TEXT)
    site.run()
    (failed,) = site.of("wrong", Failed)
    assert "cannot be found" in str(failed.error)
    for name in ("free", "sound"):
        assert site.of(name, Finished) and not site.of(name, Failed)


def test_a_grammar_whose_masks_take_long_fails_its_own_request_alone(monkeypatch):
    site = DecodeSite()
    monkeypatch.setattr(masks_of_steps, "WARY_S", -1)  # every step is looked at, and no time is allowed
    submit(site, "free", 1)
    submit(site, "slow", 2, TEXT)
    site.step(4)
    assert not site.of("slow", Failed)
    monkeypatch.setattr(masks_of_steps, "ALLOWED_S", -1)
    site.run()
    (failed,) = site.of("slow", Failed)
    assert "takes too long" in str(failed.error) and site.of("free", Finished)


@pytest.mark.parametrize("ahead", [False, True])
def test_before_min_tokens_an_output_ends_only_where_nothing_else_is_allowed(ahead, monkeypatch):
    monkeypatch.setattr(ModelRunner, "launches_async", property(lambda _: ahead))
    _, tokenizer = loaded("llama")
    end = next(iter(loaded("llama")[0].eos_token_ids))
    free = texts.whole(texts.from_regex("[a-z ]{1,90}"))
    bound = texts.whole(texts.from_choice(["yes"]))
    site = DecodeSite()
    for seed in range(4):
        submit(site, f"free{seed}", seed, free, min_tokens=20, stop_token_ids=tuple(tokenizer.encode("abc", False)))
        submit(site, f"early{seed}", seed, free, logit_bias={end: 100.0})
        submit(site, f"late{seed}", seed, free, logit_bias={end: 100.0}, min_tokens=20)
        submit(site, f"bound{seed}", seed, bound, min_tokens=20)
    site.run()
    for seed in range(4):
        tokens, *_ = site.answer(f"free{seed}")
        assert len(tokens) > 20 and not set(tokens[:20]) & {end, *tokenizer.encode("abc", False)}
        assert len(site.answer(f"early{seed}")[0]) == 2
        assert len(site.answer(f"late{seed}")[0]) == 21
        _, text, reason, *_ = site.answer(f"bound{seed}")
        assert (text, reason) == ("yes", "stop")
