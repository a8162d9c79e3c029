"""What a request may ask of its output: several sequences, stops, log probabilities, limits."""

import math
import string

import pytest
import torch

from kvrail.errors import ContextLengthError, InvalidRequestError, ModelNotFoundError
from kvrail.text import load_tokenizer
from kvrail.wire.v1 import decode_pb2
from tests.cluster.cluster import cluster
from tests.cluster.test_equality import prompt_of
from tests.models import generate, reference_model, tiny_model

STOP, LENGTH = decode_pb2.FINISH_REASON_STOP, decode_pb2.FINISH_REASON_LENGTH


async def test_n_sequences_repeat_and_differ():
    async with cluster(tiny_model("llama")) as c:
        asked = {"n": 3, "temperature": 1.0, "seed": 11, "max_tokens": 20}
        first = await c.ask(prompt_of(200), **asked)
        again = await c.ask(prompt_of(200), **asked, local=True)
        assert first.tokens == again.tokens and len(first.tokens) == 3
        assert len({tuple(tokens) for tokens in first.tokens.values()}) == 3
        assert first.summary.completion_tokens == 60
        alone = await c.ask(prompt_of(200), **{**asked, "n": 1})
        assert alone.tokens[0] == first.tokens[0]
        await c.settled()


async def test_sequences_that_end_at_their_first_token_leave_the_pages_to_the_others():
    folder = tiny_model("llama")
    async with cluster(folder) as c:
        asked = {"n": 3, "temperature": 5.0, "max_tokens": 8}
        for seed in range(20):
            probe = await c.ask(prompt_of(100), **asked, seed=seed)
            first_ends = probe.tokens[0][0]
            if first_ends not in (probe.tokens[1][0], probe.tokens[2][0]):
                break
        else:
            pytest.fail("no seed gives different first tokens")
        answer = await c.ask(prompt_of(100), **asked, seed=seed, stop_token_ids=(first_ends,))
        assert answer.tokens[0] == [first_ends] and answer.finish[0] == STOP
        assert answer.stop_reason[0] == str(first_ends)
        for index in (1, 2):
            expected = probe.tokens[index]
            cut = expected.index(first_ends) + 1 if first_ends in expected else len(expected)
            assert answer.tokens[index] == expected[:cut]
        await c.settled()


async def test_one_token_needs_no_transfer_to_end():
    async with cluster(tiny_model("llama")) as c:
        for _ in range(5):
            answer = await c.ask(prompt_of(500), max_tokens=1)
            assert answer.finish == {0: LENGTH} and len(answer.tokens[0]) == 1
        await c.settled()


async def test_text_and_stop_strings_split_over_tokens():
    folder = tiny_model("qwen3")
    tokenizer = load_tokenizer(str(folder))
    async with cluster(folder) as c:
        readable = {t: 50.0 for t in range(256) if tokenizer.token_bytes(t).decode("latin1") in string.ascii_letters}
        asked = {"max_tokens": 40, "logit_bias": readable}
        prompt = tokenizer.encode("the quick brown fox " * 6, add_special_tokens=False)
        free = await c.ask(prompt, **asked)
        whole = tokenizer.decode(free.tokens[0], skip_special_tokens=True)
        assert free.text[0] == whole and free.finish == {0: LENGTH}
        for begin in range(3, len(whole) - 3, 3):
            stop = whole[begin : begin + 3]
            answer = await c.ask(prompt, **asked, stop=(stop,))
            assert answer.text[0] == whole[: whole.index(stop)]
            assert (answer.finish[0], answer.stop_reason[0]) == (STOP, stop)
        begun = await c.ask(prompt, **asked, stop=(whole[-2:] + "never",))  # what may begin it is held back to the end
        assert (begun.text[0], begun.finish[0]) == (whole, LENGTH)
        kept = await c.ask(prompt, **asked, stop=(whole[5:8],), include_stop_in_output=True)
        assert kept.text[0] == whole[: whole.index(whole[5:8]) + 3]
        await c.settled()


@pytest.mark.parametrize("done", [1, 7, 19])
async def test_what_another_worker_began_is_continued(done):
    """Same tokens, same text, whatever was still held back: for a decode worker that is lost."""
    folder = tiny_model("llama")
    tokenizer = load_tokenizer(str(folder))
    asked = {
        "max_tokens": 20,
        "temperature": 0.8,
        "seed": 9,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "logprobs": 1,
    }
    prompt = tokenizer.encode("the quick brown fox " * 12, add_special_tokens=False)
    async with cluster(folder) as c:
        whole = await c.ask(prompt, **asked)
        rest = await c.ask(prompt, **asked, resumed=[(whole.tokens[0][:done], False)])
        assert rest.tokens[0] == whole.tokens[0][done:] and len(rest.logprobs[0]) == 20 - done
        said = Text()
        await c.ask(prompt, **asked, on_reply=said)
        assert said.up_to(done) + rest.text[0] == whole.text[0]
        with pytest.raises(InvalidRequestError, match="cannot be resumed"):
            await c.ask(prompt, **{**asked, "n": 2}, resumed=[(whole.tokens[0][:done], False)])
        await c.settled()


@pytest.mark.parametrize(
    "done", [(5, 0, 9, 0), (0, 0, 3, 0), (1, 1, 1, 1), (2, 7, 0, 20), (20, 19, 20, 4), (20, 20, 20, 1)]
)
async def test_what_another_worker_began_of_several_sequences_is_continued(done):
    """Some may have no token yet, and some may have ended."""
    folder = tiny_model("llama")
    tokenizer = load_tokenizer(str(folder))
    asked = {"max_tokens": 20, "temperature": 0.8, "seed": 9, "repetition_penalty": 1.2, "logprobs": 1, "n": 4}
    prompt = tokenizer.encode("the quick brown fox " * 12, add_special_tokens=False)
    async with cluster(folder) as c:
        whole = await c.ask(prompt, **asked)
        assert len({tuple(tokens) for tokens in whole.tokens.values()}) == 4
        resumed = [(whole.tokens[index][:count], count == 20) for index, count in enumerate(done)]
        rest = await c.ask(prompt, **asked, resumed=resumed)
        going = [index for index, count in enumerate(done) if count < 20]
        assert {index: rest.tokens[index] for index in going} == {i: whole.tokens[i][done[i] :] for i in going}
        assert set(rest.finish) == set(going) == set(rest.tokens)
        assert rest.logprobs == {index: whole.logprobs[index][done[index] :] for index in going}
        said = Text()
        await c.ask(prompt, **asked, on_reply=said)
        assert all(said.up_to(done[i], i) + rest.text[i] == whole.text[i] for i in going)
        await c.settled()


@pytest.mark.parametrize("done", [3, 9, 14])
async def test_min_tokens_and_stop_strings_leave_no_seam(done):
    """What min_tokens kept from being a stop string is none for the worker that goes on either."""
    folder = tiny_model("llama")
    prompt = load_tokenizer(str(folder)).encode("the quick brown fox " * 12, add_special_tokens=False)
    asked = {"max_tokens": 20, "temperature": 0.8, "seed": 9}
    async with cluster(folder) as c:
        said = Text()
        await c.ask(prompt, **asked, on_reply=said)
        stop = said.up_to(6)[len(said.up_to(4)) :]  # what the fifth and sixth token say
        assert stop
        asked |= {"stop": (stop,), "min_tokens": 8}
        said = Text()
        whole = await c.ask(prompt, **asked, on_reply=said)
        assert stop in whole.text[0] and len(whole.tokens[0]) > done
        rest = await c.ask(prompt, **asked, resumed=[(whole.tokens[0][:done], False)])
        assert rest.tokens[0] == whole.tokens[0][done:]
        assert said.up_to(done) + rest.text[0] == whole.text[0]
        await c.settled()


class Text:
    """What had been said after so many tokens."""

    def __init__(self):
        self.pieces = {}

    def __call__(self, reply):
        self.pieces.setdefault(reply.index, []).extend([reply.text] * bool(reply.token_ids))

    def up_to(self, count, index=0):
        return "".join(self.pieces[index][:count])


async def test_end_of_sequence_and_min_tokens():
    folder = tiny_model("llama")
    async with cluster(folder) as c:
        eos = 256
        prompt = [token % 60 for token in prompt_of(80)]  # plain characters: no half of one is left over
        bias = {eos: 100.0}
        ended = await c.ask(prompt, ignore_eos=False, logit_bias=bias)
        assert ended.tokens[0] == [eos] and ended.finish[0] == STOP and ended.text[0] == ""
        later = await c.ask(prompt, ignore_eos=False, logit_bias=bias, min_tokens=5)
        assert later.tokens[0][-1] == eos and eos not in later.tokens[0][:-1] and len(later.tokens[0]) == 6
        ignored = await c.ask(prompt, ignore_eos=True, logit_bias=bias)
        assert ignored.tokens[0] == [eos] * 16
        await c.settled()


async def test_log_probabilities_are_the_models():
    folder = tiny_model("mistral")
    model = reference_model(str(folder))
    async with cluster(folder) as c:
        prompt = prompt_of(70)
        answer = await c.ask(prompt, logprobs=4, max_tokens=6)
        tokens = [*prompt, *answer.tokens[0]]
        with torch.inference_mode():
            expected = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        assert len(answer.logprobs[0]) == 6
        for number, got in enumerate(answer.logprobs[0]):
            row = expected[len(prompt) - 1 + number]
            assert math.isclose(got.logprob, row[answer.tokens[0][number]], abs_tol=2e-3)
            values, ids = row.topk(4)
            assert [t.token_id for t in got.top] == ids.tolist()
            for top, value in zip(got.top, values.tolist(), strict=True):
                assert math.isclose(top.logprob, value, abs_tol=2e-3)


async def test_what_cannot_be_served_is_refused_by_name():
    async with cluster(tiny_model("llama"), num_pages=20) as c:
        with pytest.raises(ContextLengthError, match="KV cache holds 1280"):
            await c.ask(prompt_of(1200), max_tokens=200)
        with pytest.raises(InvalidRequestError, match="token id 999") as caught:
            await c.ask([1, 999])
        assert caught.value.param == "prompt"
        with pytest.raises(InvalidRequestError, match="codec 'zip' is unknown; choose one of raw"):
            await c.ask([1, 2], codec="zip")
        with pytest.raises(InvalidRequestError, match="temperature"):
            await c.ask([1, 2], temperature=-1.0)
        with pytest.raises(ModelNotFoundError, match="'other'"):
            request = decode_pb2.GenerateRequest(request_id="m", model="other", prompt_token_ids=[1])
            async with c.client.events.submit(request) as replies:
                await replies.read()
        assert (await c.ask(prompt_of(500))).tokens == {
            0: generate(str(tiny_model("llama")), tuple(prompt_of(500)), 16)
        }
        await c.settled()
