"""Outputs that match a grammar: valid, and the same whoever computes what, with drafts, after a loss, in any batch."""

import asyncio
import json
import random

import jsonschema
import pytest

from kvrail.errors import InvalidRequestError
from kvrail.grammar import texts
from kvrail.text import load_tokenizer
from kvrail.wire.v1 import decode_pb2
from tests.cluster.cluster import cluster
from tests.cluster.halves import staged_codecs  # noqa: F401  a fixture
from tests.cluster.staged import SHARED, drafted, hold_later_stages
from tests.cluster.test_equality import prompt_of
from tests.models import tiny_model

pytestmark = pytest.mark.usefixtures("staged_codecs")
STOP, LENGTH = decode_pb2.FINISH_REASON_STOP, decode_pb2.FINISH_REASON_LENGTH
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["fox", "dog", "naïve ☃"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,4}$"}, "maxItems": 3},
        "next": {"anyOf": [{"$ref": "#/$defs/leaf"}, {"type": "null"}]},
    },
    "required": ["name", "kind", "age", "tags", "next"],
    "additionalProperties": False,
    "$defs": {"leaf": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "additionalProperties": False}},
}
GRAMMAR = texts.whole(texts.from_schema(SCHEMA, lenient=False))
ASKED = {"grammar": GRAMMAR, "temperature": 1.0, "max_tokens": 200}


def assert_valid(answer, schema=SCHEMA):
    for index, finish in answer.finish.items():
        if finish == STOP:
            jsonschema.validate(json.loads(answer.text[index]), schema)
        else:
            assert finish == LENGTH


async def test_a_worker_takes_the_length_of_its_logits_for_the_vocabulary(monkeypatch):
    """Gemma 3's larger configurations leave it out, and its tokenizer has fewer tokens."""
    monkeypatch.setattr("kvrail.text.tokenizer._vocab_size", lambda backend, _: backend.get_vocab_size())
    async with cluster(tiny_model("llama", vocab_size=400)) as c:
        assert_valid(await c.ask(prompt_of(20), grammar=GRAMMAR, temperature=1.0, max_tokens=30))


async def test_outputs_match_and_are_the_same_computed_here_or_elsewhere():
    async with cluster(tiny_model("llama")) as c:
        ended, asked = 0, [(seed, local) for seed in range(4) for local in (False, True)]
        answers = await asyncio.gather(
            *(c.ask(prompt_of(200), **ASKED, seed=seed, logprobs=1, local=local) for seed, local in asked)
        )
        for elsewhere, here in zip(answers[::2], answers[1::2], strict=True):
            assert here.tokens == elsewhere.tokens and here.text == elsewhere.text
            assert elsewhere.summary.prefill_worker and not here.summary.prefill_worker
            assert_valid(elsewhere)
            ended += elsewhere.finish[0] == STOP
        assert ended
        greedy = await c.ask(prompt_of(200), grammar=GRAMMAR, max_tokens=200)
        assert_valid(greedy)
        await c.settled()


async def test_each_of_n_sequences_has_a_place_of_its_own_in_the_grammar():
    async with cluster(tiny_model("llama")) as c:
        both = await c.ask(prompt_of(200), **ASKED, seed=3, n=4)
        alone = await c.ask(prompt_of(200), **ASKED, seed=3, local=True)
        assert both.tokens[0] == alone.tokens[0] and len({tuple(each) for each in both.tokens.values()}) == 4
        assert_valid(both)
        await c.settled()


@pytest.mark.parametrize("codec", ["halves", "noise"])
async def test_drafts_do_not_change_the_output(monkeypatch, codec):
    gate = asyncio.Event()
    hold_later_stages(monkeypatch, gate.wait)
    async with cluster(tiny_model("llama"), prefix_cache=False, **SHARED) as c:
        whole = await asyncio.gather(*(c.ask(prompt_of(300), codec="raw", **ASKED, seed=seed) for seed in range(3)))
        asking = [asyncio.create_task(c.ask(prompt_of(300), codec=codec, **ASKED, seed=seed)) for seed in range(3)]
        await drafted(c.decode, sum(min(20, len(raw.tokens[0]) // 2) for raw in whole))
        gate.set()
        for raw, staged in zip(whole, await asyncio.gather(*asking), strict=True):
            assert staged.tokens == raw.tokens and staged.text == raw.text and staged.finish == raw.finish
            assert_valid(staged)
            assert staged.summary.drafts_proposed
            assert codec == "noise" or staged.summary.drafts_accepted  # drafts follow the grammar too
        await c.settled()


async def test_another_worker_continues_where_the_grammar_was():
    async with cluster(tiny_model("llama")) as c:
        whole = await c.ask(prompt_of(100), **ASKED, seed=1)
        done = range(1, len(whole.tokens[0]), 17)
        resumed = ([(whole.tokens[0][:count], False)] for count in done)
        rest = await asyncio.gather(*(c.ask(prompt_of(100), **ASKED, seed=1, resumed=each) for each in resumed))
        assert [each.tokens[0] for each in rest] == [whole.tokens[0][count:] for count in done]
        with pytest.raises(InvalidRequestError, match="do not match the grammar"):
            await c.ask(prompt_of(100), **ASKED, seed=1, resumed=[([ord("x")], False)])
        await c.settled()


async def test_preempted_and_batched_with_free_outputs_they_are_the_same():
    """Pages for half of the sequences: they are preempted, and come back."""
    asked = [{**(ASKED if seed % 2 else {}), "seed": seed, "max_tokens": 80} for seed in range(6)]
    rng = random.Random(5)
    prompts = [prompt_of(rng.randrange(20, 90)) for _ in asked]
    async with cluster(tiny_model("llama")) as c:
        alone = [await c.ask(prompt, **each) for prompt, each in zip(prompts, asked, strict=True)]
        await c.settled()
    async with cluster(tiny_model("llama"), decode={"num_pages": 24, "page_size": 16}, prefill={"page_size": 16}) as c:
        together = await asyncio.gather(*(c.ask(p, **each) for p, each in zip(prompts, asked, strict=True)))
        assert c.decode.engine._scheduler.preemptions
        assert [each.tokens for each in together] == [each.tokens for each in alone]
        await c.settled()


async def test_a_grammar_ends_the_output_even_where_eos_is_ignored():
    async with cluster(tiny_model("llama")) as c:
        answer = await c.ask(prompt_of(50), grammar=texts.whole(texts.from_choice(["yes", "no"])), max_tokens=50)
        assert answer.text[0] in ("yes", "no") and answer.finish == {0: STOP}
        cut = await c.ask(prompt_of(50), grammar=texts.whole(texts.from_regex("a{400}")), max_tokens=12)
        assert cut.finish == {0: LENGTH} and set(cut.text[0]) == {"a"}
        await c.settled()


async def test_what_cannot_be_compiled_or_followed_is_an_error_and_hurts_nobody_else():
    lark = texts.whole(texts.from_lark("start: missing"))
    tokenizer = load_tokenizer(str(tiny_model("llama")))
    async with cluster(tiny_model("llama")) as c:
        free = await c.ask(prompt_of(50))
        for local in (True, False):
            with pytest.raises(InvalidRequestError, match="unknown name"):
                await c.ask(prompt_of(50), grammar=lark, local=local)
        # A text that the lexer can only follow with more states than it may have: it ends, and does not hang.
        costly = texts.whole(texts.from_regex("(a|b)*a(a|b){40}c"))
        try:
            answer = await c.ask(tokenizer.encode("ab" * 30, add_special_tokens=False), grammar=costly, max_tokens=150)
        except InvalidRequestError as error:
            assert error.param == "grammar"
        else:
            assert answer.finish[0] in (STOP, LENGTH)
        assert (await c.ask(prompt_of(50))).tokens == free.tokens
        await c.settled()
