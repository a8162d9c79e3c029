"""Grammars: what compiles, what is refused, and that a matcher's place depends on the tokens before it alone."""

import asyncio
import itertools
import json
import random
import signal
import threading
from contextlib import asynccontextmanager

import jsonschema
import pytest

from kvrail.config.settings import DEMO_MODEL
from kvrail.errors import InvalidRequestError
from kvrail.grammar import Checker, Grammars, texts
from kvrail.grammar import checking as checks
from kvrail.grammar.closing import closed
from kvrail.grammar.following import CHECK_S
from kvrail.grammar.keys import MAX_PATTERNED
from kvrail.grammar.texts import MAX_OPTIONAL
from kvrail.text import load_tokenizer
from kvrail.values.sampling import MAX_GRAMMAR_BYTES
from kvrail.wire.convert import sampling_from_proto, sampling_to_proto
from tests.engine.test_sampler import row
from tests.models import tiny_model

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "é"]}}, "required": ["a", "b"]}


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(tiny_model("llama")))


@pytest.fixture
def grammars(tokenizer):
    return Grammars(lambda: tokenizer)


@asynccontextmanager
async def checking(tokenizer):
    checker = Checker(tokenizer)
    try:
        yield checker
    finally:
        await checker.close()


@pytest.fixture
async def checker(tokenizer):
    async with checking(tokenizer) as checker:
        yield checker


def allowed(matcher, vocab_size):
    mask = int.from_bytes(matcher.state.compute_bitmask(), "little")
    return [token for token in range(vocab_size) if mask >> token & 1]


def write(matcher, tokenizer, rng, most=80):
    """Random tokens that match, and whether they came to an end."""
    tokens = []
    while len(tokens) < most:
        token = rng.choice(allowed(matcher, tokenizer.vocab_size))
        if token in tokenizer.eos_token_ids and matcher.complete:
            return tokens, True
        matcher.move_to([*tokens, token])
        tokens.append(token)
    return tokens, False


async def test_what_is_written_is_valid(grammars, tokenizer):
    grammar = await grammars.get(texts.whole(texts.from_schema(SCHEMA, lenient=False)), "a")
    ended = 0
    for seed in range(30):
        tokens, done = write(grammar.matcher(), tokenizer, random.Random(seed))
        if done:
            jsonschema.validate(json.loads(tokenizer.decode(tokens, skip_special_tokens=True)), SCHEMA)
        ended += done
    assert ended > 10


async def test_a_place_depends_on_the_tokens_before_it_alone(grammars, tokenizer):
    """Ahead, back, into wrong drafts and out of them: the mask is that of a matcher that went straight there."""
    rng = random.Random(2)
    grammar = await grammars.get(texts.whole(texts.from_schema(SCHEMA, lenient=False)), "a")
    outputs = [write(grammar.matcher(), tokenizer, rng)[0] for _ in range(6)]
    moved = grammar.matcher()
    for _ in range(150):
        tokens = rng.choice(outputs)
        place = tokens[: rng.randint(0, len(tokens))]
        straight = grammar.matcher()
        assert moved.move_to(place) == straight.move_to(place) == len(place)
        assert allowed(moved, tokenizer.vocab_size) == allowed(straight, tokenizer.vocab_size)
        assert moved.complete == straight.complete
        wrong = [rng.randrange(tokenizer.vocab_size) for _ in range(3)]
        assert moved.move_to([*place, *wrong]) == straight.move_to([*place, *wrong])


@pytest.mark.parametrize(
    ("part", "word"),
    [
        (texts.from_schema({"type": "nothing"}, lenient=False), "nothing"),
        (texts.from_schema({"allOf": [{"type": "string"}, {"type": "null"}]}, lenient=True), "Unsatisfiable"),
        (texts.from_schema({"type": "array", "uniqueItems": True}, lenient=False), "uniqueItems"),
        (texts.from_schema({"$ref": "https://example.com/x"}, lenient=True), "example.com"),
        (texts.from_schema({"$ref": "#"}, lenient=False), "no text matches"),
        (texts.from_regex("(a"), "regex"),
        (texts.from_lark("start: missing"), "missing"),
        (texts.from_lark("start: " + "(" * 10_000 + '"a"' + ")" * 10_000), "nested"),
    ],
)
async def test_what_does_not_compile_is_refused(grammars, checker, part, word):
    for ask in (checker.check, grammars.get):
        with pytest.raises(InvalidRequestError, match=word):
            await ask(texts.whole(part), "a")


async def test_what_costs_too_much_is_refused():
    """Each compiles at once, and takes seconds a token under llguidance's own limits, or fails after some."""
    async with checking(load_tokenizer(DEMO_MODEL)) as checker:
        ambiguous = texts.from_lark("start: s\ns: s s | s s s | /[a-z ]/ |")
        with pytest.raises(InvalidRequestError, match="items"):
            await checker.check(texts.whole(ambiguous), "a")
        for schema in (
            {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(400)}},
            {"enum": [f"v{i}" for i in range(3000)]},
        ):
            await checker.check(texts.whole(texts.from_schema(schema, lenient=True)), "a")


def test_objects_of_many_optional_properties_are_refused_before_they_are_compiled():
    wide = {f"p{i}": {"type": "string"} for i in range(MAX_OPTIONAL + 1)}
    required = {"properties": {**wide, "more": {}}, "required": ["p1", "unknown", "p1"]}
    for schema in ({"properties": wide}, {"items": {"anyOf": [{"type": "null"}, required]}}):
        with pytest.raises(InvalidRequestError, match=f"{MAX_OPTIONAL + 1} optional properties"):
            texts.from_schema(schema, lenient=True)
    texts.from_schema({"properties": wide, "required": list(wide)}, lenient=True)


ENDLESS = texts.whole(texts.from_lark("start: T\nT: " + " & ".join(f"/.*a{i}.*/" for i in range(200))))
DEEP = texts.whole(
    texts.from_lark("start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(8000)) + '\nr8000: "a"')
)


async def test_references_may_be_as_deep_as_real_schemas_have_them(checker):
    chain = {f"a{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(60)}
    schema = {"$ref": "#/$defs/a0", "$defs": chain | {"a60": {"type": "string"}}}
    await checker.check(texts.whole(texts.from_schema(schema, lenient=False)), "a")


async def test_what_would_hold_up_or_end_the_process_is_refused(checker):
    """The first one compiles for hours, the second overflows the stack: of a process that can be lost."""
    good = texts.whole(texts.from_choice(["a"]))
    for text, word in ((ENDLESS, f"more than {CHECK_S:g} s"), (DEEP, "nested too deeply"), (ENDLESS, "more than")):
        with pytest.raises(InvalidRequestError, match=word):
            await checker.check(text, "a")
        await checker.check(good, "a")
        good += " "


async def test_bounds(checker):
    deep = {}
    for _ in range(60):
        deep = {"properties": {"a": deep}}
    with pytest.raises(InvalidRequestError, match="nested deeper"):
        texts.from_schema(deep, lenient=True)
    with pytest.raises(InvalidRequestError, match="no JSON schema"):
        texts.from_schema(False, lenient=True)
    long = texts.whole(texts.from_choice(["x" * MAX_GRAMMAR_BYTES]))
    with pytest.raises(InvalidRequestError, match="bytes"):
        await checker.check(long, "a")
    with pytest.raises(InvalidRequestError, match="bytes"):
        sampling_to_proto(row(0, grammar=long).params)
    for make in (texts.from_lark_or_gbnf, texts.from_regex, lambda text: texts.from_choice([text])):
        with pytest.raises(InvalidRequestError, match="surrogate"):
            await checker.check(texts.whole(make("\ud800")), "a")


async def test_the_process_ends_where_no_thread_can_be_had_any_more(tokenizer):
    """As at the end of the interpreter."""
    checker = Checker(tokenizer)
    await checker.check(texts.whole(texts.from_choice(["a"])), "a")
    await asyncio.get_running_loop().shutdown_default_executor()
    process = checker._process
    await checker.close()
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("fewer", [False, True])
async def test_logits_may_be_more_or_fewer_than_the_tokens(fewer):
    """A token that was added behind the vocabulary, and has no logit, is not a part of any grammar."""
    tokenizer = load_tokenizer(str(tiny_model("llama")))
    tokenizer._backend.add_special_tokens(["<added>"])
    added = tokenizer.token_id("<added>")
    tokenizer.vocab_size = added if fewer else added + 1
    size = added if fewer else added + 100
    async with checking(tokenizer) as checker:
        text = await checker.check(texts.whole(texts.from_regex("[a-z]+")), "a")
    for grammars in (Grammars(lambda: tokenizer, vocab_size=size), Grammars(lambda: tokenizer)):
        matcher = (await grammars.get(text, "a")).matcher()
        assert set(tokenizer.encode("ab", False)) < set(allowed(matcher, size)) - {added}
    matcher = (await Grammars(lambda: tokenizer, vocab_size=size).get(text, "a")).matcher()
    assert len(matcher.state.compute_bitmask()) == 4 * -(-size // 32)


async def test_lenient_schemas_pass_over_what_cannot_be_enforced(checker):
    await checker.check(texts.whole(texts.from_schema({"type": "array", "uniqueItems": True}, lenient=True)), "a")


async def test_the_same_grammar_is_compiled_once(grammars, monkeypatch):
    compiled = []
    compile_one = grammars._compile
    monkeypatch.setattr(grammars, "_compile", lambda text: compiled.append(text) or compile_one(text))
    text = texts.whole(texts.from_choice(["a", "b"]))
    assert len({id(each) for each in await asyncio.gather(*(grammars.get(text, str(i)) for i in range(5)))}) == 1
    assert len(compiled) == 1
    for number in range(40):
        await grammars.get(texts.whole(texts.from_choice([str(number)])), "a")
    assert len(grammars._cached) == 32


async def test_verdicts_are_kept_bad_ones_too(checker, monkeypatch):
    asked, ask = [], checker._ask
    monkeypatch.setattr(checker, "_ask", lambda text: asked.append(text) or ask(text))
    monkeypatch.setattr(checks, "MAX_CHECKED", 3)
    good, bad = texts.whole(texts.from_choice(["a"])), texts.whole(texts.from_lark("start: missing"))
    await asyncio.gather(*(checker.check(good, str(i)) for i in range(5)))
    for _ in range(3):
        await checker.check(good, "a")
        with pytest.raises(InvalidRequestError, match="missing"):
            await checker.check(bad, "a")
    assert asked == [good, bad]
    for number in range(4):
        await checker.check(texts.whole(texts.from_choice([str(number)])), "a")
    assert len(checker._verdicts) == 3


@pytest.mark.parametrize("kind", ["checker", "grammars"])
async def test_one_clients_grammars_wait_behind_its_own(kind, tokenizer, monkeypatch):
    """Another client's one comes next; of a client that leaves nothing is compiled."""
    found = Checker(tokenizer) if kind == "checker" else Grammars(lambda: tokenizer)
    begun, gate, first = [], threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def work(text):
        begun.append(text)
        loop.call_soon_threadsafe(first.set)
        gate.wait()
        return "", ""

    monkeypatch.setattr(found, "_ask" if kind == "checker" else "_compile", work)
    ask = found.check if kind == "checker" else found.get
    tasks = [asyncio.create_task(ask(f"greedy {i}", "greedy")) for i in range(12)]
    await first.wait()
    left = [asyncio.create_task(ask(f"left {i}", "left")) for i in range(3)]
    tasks.append(asyncio.create_task(ask("small", "modest")))
    await asyncio.sleep(0)
    for task in left:
        task.cancel()
    gate.set()
    await asyncio.gather(*tasks)
    assert begun[:3] == ["greedy 0", "small", "greedy 1"]
    assert not any(text.startswith("left") for text in begun)


def test_a_grammar_travels_with_the_parameters():
    params = row(0, grammar="é" * 10).params
    assert sampling_from_proto(sampling_to_proto(params)) == params


def gbnf(text):
    return texts.whole(texts.from_lark("start: @answer"), answer=texts.from_lark_or_gbnf(text))


async def test_gbnf_travels_as_lark(checker, grammars, tokenizer):
    text = await checker.check(gbnf('root ::= "a" [0-9]+'), "a")
    assert "start" in json.loads(text)["grammars"][1]["lark_grammar"]
    assert accepts(await grammars.get(text, "a"), tokenizer, "a15")
    lark = 'start: "a" /[0-9]+/'
    same = texts.whole(texts.from_lark("start: @answer"), answer=texts.from_lark(lark))
    assert json.loads(await checker.check(gbnf(lark), "a")) == json.loads(same)
    with pytest.raises(InvalidRequestError, match="neither Lark nor GBNF"):
        await checker.check(gbnf('root ::= "a'), "a")
    with pytest.raises(InvalidRequestError, match="missing"):
        await checker.check(gbnf("start: missing"), "a")


CHAIN = "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1}" for i in range(4000))


@pytest.mark.parametrize("costly", ["\n" * 50_000, CHAIN])
async def test_grammars_that_are_costly_to_read_are_read_by_the_process_that_can_be_lost(checker, monkeypatch, costly):
    """Of blank lines and of a chain of rules each takes time by its square. Another client's grammar gets through."""
    monkeypatch.setattr("llguidance.gbnf_to_lark.is_lark_syntax", None)  # of this process
    asked = checker.check(gbnf(costly + '\nr4000 ::= "x"'), "a"), checker.check(gbnf('root ::= "a"'), "b")
    refused, checked = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(refused, InvalidRequestError) and f"more than {CHECK_S:g} s" in str(refused)
    assert isinstance(checked, str)


INTEGER = {"type": "integer"}


def naming(*names, **more):
    return {"type": "object", "properties": dict.fromkeys(names, INTEGER), **more}


@pytest.mark.parametrize(
    "schema",
    [
        naming("a", "b", minProperties=1),
        naming("a", "b", minProperties=2),
        naming("a", "b", "c", minProperties=2),
        naming("a", "b", "c", "d", required=["d"], minProperties=3),
        naming("a", "b", required=["b"], minProperties=1),
        naming("a", required=["a"], minProperties=2, additionalProperties=INTEGER),
        naming("a", required=["a"], minProperties=2),
        {"type": "object", "patternProperties": {"^a$": INTEGER}, "additionalProperties": False},
        {"type": "object", "patternProperties": {"^(?:a|b)$": INTEGER, "^c$": {"type": "null"}}, "minProperties": 2},
    ],
)
async def test_objects_have_as_many_properties_as_they_must(grammars, checker, tokenizer, schema):
    """Of small objects those that are valid are written, and no others; jsonschema says which are valid."""
    named = schema.get("properties", "abc")
    closed_schema = schema if len(named) < schema.get("minProperties", 0) else {"additionalProperties": False, **schema}
    for lenient in (False, True):
        text = texts.whole(texts.from_schema({"type": "array", "items": schema}, lenient=lenient))
        await checker.check(text, "a")
        grammar, written = await grammars.get(text, "a"), 0
        for names in (names for size in range(5) for names in itertools.combinations("abcd", size)):
            value = dict.fromkeys(names, 1)
            follows = accepts(grammar, tokenizer, json.dumps([value]))
            assert follows == jsonschema.Draft202012Validator(closed_schema).is_valid(value), value
            written += follows
        assert written


def accepts(grammar, tokenizer, text):
    tokens = tokenizer.encode(text, add_special_tokens=False)
    matcher = grammar.matcher()
    return matcher.move_to(tokens) == len(tokens) and matcher.complete


async def test_keys_do_not_come_again_and_again(grammars, tokenizer):
    async def follows(schema, *keys):
        grammar = await grammars.get(texts.whole(texts.from_schema(schema, lenient=True)), "a")
        return accepts(grammar, tokenizer, "{" + ", ".join(f'"{key}": 1' for key in keys) + "}")

    listed = {"type": "object", "patternProperties": {"^(x|y)$": INTEGER}}
    assert await follows(listed, "x", "y") and not await follows(listed, "x", "x")
    free = {"type": "object", "patternProperties": {"^x": INTEGER}}
    assert await follows(free, *["x"] * MAX_PATTERNED) and not await follows(free, *["x"] * (MAX_PATTERNED + 1))
    assert await follows(free | {"maxProperties": 99}, *(f"x{i}" for i in range(99)))


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        (naming("a", patternProperties={"^x": INTEGER}), "patternProperties"),
        ({"items": {"type": "object", "additionalProperties": INTEGER, "minProperties": 2}}, "minProperties"),
        (naming(*"abcdefghijkl", minProperties=6), "minProperties"),
    ],
)
def test_bounds_on_keys_that_cannot_be_kept_to_are_refused_where_strict(schema, word):
    with pytest.raises(InvalidRequestError, match=f"'{word}'"):
        texts.from_schema(schema, lenient=False)
    if word == "minProperties":
        texts.from_schema(schema, lenient=True)


INNER = {"type": "object", "properties": {"x": {"type": "integer"}}}
CLOSED = {**INNER, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (INNER, CLOSED),
        ({"items": INNER, "$defs": {"a": INNER}}, {"items": CLOSED, "$defs": {"a": CLOSED}}),
        ({"anyOf": [INNER, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"properties": {"properties": INNER}}, {"properties": {"properties": CLOSED}, "additionalProperties": False}),
        ({"type": "object"}, {"type": "object"}),
        ({"enum": [INNER]}, {"enum": [INNER]}),
        *(
            (same, same)
            for same in (
                {**INNER, "additionalProperties": True},
                {**INNER, "required": ["y"]},
                {**INNER, "anyOf": [INNER]},
                {"allOf": [INNER, {"properties": {"y": {}}}]},
                {"items": {**INNER, "if": {}, "then": {}}},
            )
        ),
    ],
)
def test_objects_are_closed_where_their_schema_says_nothing_of_others(schema, expected):
    assert closed(schema) == expected
