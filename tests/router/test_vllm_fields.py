"""Fields of vLLM's requests that change an output or share its prefix: what each does, up to the worker."""

import json
import random
import re

import pytest

from kvrail.errors import InvalidRequestError
from kvrail.grammar import Grammars
from kvrail.services.router.fleet import ways
from kvrail.services.router.plan.structural import structural
from kvrail.text import Tokenizer
from kvrail.values.pagehash import page_digest, page_hashes
from kvrail.wire.v1 import common_pb2, decode_pb2
from tests.router.cluster import Cluster, run_cluster, status, summary, until
from tests.router.writing import STOP, matching


async def written(tokenizer: Tokenizer, text: str, seed: int, count: int, favoured: list[int]) -> list[int]:
    """Tokens that a grammar allows, with a liking for some."""
    grammar = await Grammars(lambda: tokenizer).get(text, "")
    matcher, rng, tokens = grammar.matcher(), random.Random(seed), []
    for _ in range(count):
        mask = int.from_bytes(matcher.state.compute_bitmask(), "little")
        allowed = [token for token in range(280) if mask >> token & 1 and token not in tokenizer.eos_token_ids]
        liked = [token for token in favoured if token in allowed]
        tokens.append(rng.choice(liked if liked and rng.random() < 0.9 else allowed))
        assert matcher.move_to(tokens) == len(tokens)
        assert matcher.complete
    return tokens


def stands_in(part: list[int], whole: list[int]) -> bool:
    return any(whole[i : i + len(part)] == part for i in range(len(whole)))


async def test_bad_words_never_stand_in_an_output(cluster: Cluster, thinking: Tokenizer, tokenizer: Tokenizer):
    words = ["hello", "xx", "xyx", "yxz", "q", "xyxzw"]
    banned = [tokenizer.encode(word, False) for word in words]
    behind_space = [tokenizer.encode(f" {word}", False) for word in words]
    banned += [spaced for plain, spaced in zip(banned, behind_space, strict=True) if len(spaced) == len(plain)]
    favoured = sorted({token for tokens in banned for token in tokens})
    assert max(map(len, banned)) > 2
    async with run_cluster(thinking) as other:
        for ask, where in ((cluster.chat, cluster), (cluster.complete, cluster), (other.chat, other)):
            assert (await ask(bad_words=words, min_tokens=2)).status_code == 200
            text = where.decode[0].requests[-1].sampling.grammar
            for seed in range(5):
                tokens = await written(tokenizer, text, seed, 200, favoured)
                assert not any(stands_in(part, tokens) for part in banned)
                # What is banned is all that is missing: the word without its last token is written.
                assert any(stands_in(part[:-1], tokens) for part in banned if len(part) > 1)
    assert (await cluster.chat(bad_words=[])).status_code == 200
    assert not cluster.decode[0].requests[-1].sampling.grammar
    many = await cluster.chat(bad_words=[f"{i:0128b}" for i in range(64)])
    assert many.json()["error"]["param"] == "bad_words", many.text


async def test_prefixes_of_different_salts_are_not_looked_for_in_each_other(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    layout = common_pb2.KVLayout(page_size=16)
    cluster.decode[0].status, cluster.prefill[0].status = status(layout=layout), status(layout=layout)
    await until(lambda: cluster.service.pool.page_size == 16)
    looked_for = []
    choose = ways.choose
    monkeypatch.setattr(ways, "choose", lambda *a, **k: looked_for.append(tuple(a[1].pages)) or choose(*a, **k))
    prompt = list(range(20, 60))
    for salt in (None, "tenant", "other", "tenant"):
        answer = await cluster.complete(prompt=prompt, cache_salt=salt)
        assert answer.status_code == 200, answer.text
        assert cluster.decode[0].requests[-1].cache_salt == (salt or "")
    assert looked_for[0] == tuple(map(page_digest, page_hashes(prompt, 16)))
    assert looked_for[1] == looked_for[3] != looked_for[2]
    assert len({page for pages in looked_for for page in pages}) == 6
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "cache_salt": "a"}
    assert (await cluster.http.post("/v1/messages", json=body)).status_code == 200
    assert cluster.decode[0].requests[-1].cache_salt == "a"


async def test_log_probabilities_of_named_tokens(cluster: Cluster, tokenizer: Tokenizer):
    """All that are named are told, beside the token itself, as many as they are."""

    async def script(worker, request):
        found = common_pb2.TokenLogprobs(logprob=-0.5)
        found.top.extend(common_pb2.TopLogprob(token_id=i, logprob=-i) for i in request.sampling.logprob_token_ids)
        yield decode_pb2.GenerateReply(token_ids=[80], logprobs=[found], finish_reason=STOP, text="x")
        yield decode_pb2.GenerateReply(summary=summary(1, 1))

    cluster.decode[0].script = script
    named = list(range(60, 90))  # more than the likely ones that may be asked for
    answer = await cluster.chat(logprobs=True, logprob_token_ids=named)
    (entry,) = answer.json()["choices"][0]["logprobs"]["content"]
    assert [found["token"] for found in entry["top_logprobs"]] == [
        tokenizer.token_text(token) for token in (80, *(token for token in named if token != 80))
    ]
    answer = await cluster.chat(logprobs=True, logprob_token_ids=[60, 61])
    assert len(answer.json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 3
    answer = await cluster.complete(logprobs=0, logprob_token_ids=[60, 61])
    (top,) = answer.json()["choices"][0]["logprobs"]["top_logprobs"]
    assert top == {tokenizer.token_text(80): -0.5, tokenizer.token_text(60): -60, tokenizer.token_text(61): -61}


NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
TRIGGERED = {
    "structures": [{"begin": "<f=a>", "schema": NUMBER, "end": "</f>"}, {"begin": "<f=b>", "schema": True, "end": ""}],
    "triggers": ["<f="],
}
TREE = {
    "format": {
        "type": "sequence",
        "elements": [
            {"type": "const_string", "value": "say:"},
            {"type": "tag", "begin": "[", "content": {"type": "any_text"}, "end": "]"},
            {
                "type": "or",
                "elements": [
                    {"type": "regex", "pattern": "[0-9]{2}/x"},
                    {"type": "json_schema", "json_schema": {"enum": ["y", "z"]}},
                ],
            },
        ],
    }
}
TAGGED = [
    (
        TRIGGERED,
        r"((?!<f=).|\n)*(<f=a>\{ ?\n?[ \t]*\"n\".*?</f>((?!<f=).|\n)*|<f=b>(.|\n)*)*",
        'free text, <f=a>{"n": 5}</f> and',
    ),
    (TREE, r'say:\[(.|\n)*\]([0-9]{2}/x|"[yz]")', "say:[any x]12/x"),
    (
        {
            "format": {
                "type": "triggered_tags",
                "triggers": ["<|user|>"],
                "tags": [{"begin": "<|user|>", "content": {"type": "regex", "pattern": "a+"}, "end": "b"}],
                "at_least_one": True,
                "stop_after_first": True,
            }
        },
        r"((?!<\|user\|>).|\n)*<\|user\|>a+b",
        "text <|user|>aab",
    ),
]


@pytest.mark.parametrize(("tags", "pattern", "example"), TAGGED, ids=["legacy", "tree", "special"])
async def test_structural_tags(cluster: Cluster, tokenizer: Tokenizer, tags, pattern, example):
    forms = [
        {"response_format": {"type": "structural_tag", **tags}},
        {"structured_outputs": {"structural_tag": json.dumps(tags)}},
    ]
    grammars = set()
    for form in forms:
        for ask in (cluster.chat, cluster.complete):
            answer = await ask(**form)
            assert answer.status_code == 200, answer.text
            grammars.add(cluster.decode[0].requests[-1].sampling.grammar)
    (grammar,) = grammars
    matcher = (await Grammars(lambda: tokenizer).get(grammar, "")).matcher()
    tokens = tokenizer.encode(example, add_special_tokens=False)
    assert matcher.move_to(tokens) == len(tokens)
    assert matcher.complete
    cluster.decode[0].script = matching
    for seed in range(4):
        answer = await cluster.complete(**forms[0], seed=seed, max_tokens=300, skip_special_tokens=False)
        (choice,) = answer.json()["choices"]
        if choice["finish_reason"] == "stop":
            assert re.fullmatch(pattern, choice["text"]), choice["text"]
    wrong = tokenizer.encode(example.replace("a", "é", 1).replace("5", '"'), add_special_tokens=False)
    assert matcher.move_to(wrong) < len(wrong) or tags is TREE


@pytest.mark.parametrize(
    ("tags", "param"),
    [
        ({}, "format"),
        ({"structures": [], "triggers": ["x"]}, "structures"),
        ({"structures": [{"begin": "y", "schema": True, "end": ""}], "triggers": ["x"]}, "tags.0.begin"),
        ({"structures": [{"begin": "x", "schema": 5, "end": ""}], "triggers": ["x"]}, "tags.0.content.json_schema"),
        ({"format": {"type": "qwen_xml_parameter"}}, "format.type"),
        ({"format": {"type": "json_schema", "json_schema": {"uniqueItems": True}}}, "format.json_schema.uniqueItems"),
        ({"format": {"type": "regex", "pattern": "("}}, "format.pattern"),
    ],
)
async def test_structural_tags_that_cannot_be_followed(cluster: Cluster, tags, param):
    answer = await cluster.chat(response_format={"type": "structural_tag", **tags})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == f"response_format.{param}", answer.text


def test_structural_tags_are_written_at_a_cost_that_is_bounded(tokenizer: Tokenizer, monkeypatch):
    """Special tokens are listed once, however many texts there are, and what is too long is not written to its end."""
    looked_up, find = [], tokenizer.token
    monkeypatch.setattr(tokenizer, "token", lambda token_id: looked_up.append(token_id) or find(token_id))
    for kind, many in (({"type": "const_string", "value": "a"}, 100), ({"type": "regex", "pattern": "a" * 2000}, 256)):
        tags = {"format": {"type": "sequence", "elements": [kind] * many}}
        looked_up.clear()
        if many == 100:
            assert structural("p", tags, tokenizer).count('"a"') == many
        else:
            with pytest.raises(InvalidRequestError, match="more than 262144 bytes"):
                structural("p", tags, tokenizer)
        assert len(looked_up) == len(tokenizer.special_ids)


async def test_min_tokens_beside_a_grammar_reaches_the_worker(cluster: Cluster):
    for form in ({"response_format": {"type": "json_object"}}, {"allowed_token_ids": [70, 71]}):
        assert (await cluster.chat(**form, min_tokens=3)).status_code == 200
        sampling = cluster.decode[0].requests[-1].sampling
        assert sampling.grammar and sampling.min_tokens == 3
