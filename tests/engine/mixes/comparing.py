"""What is true of every answer: it is the one that the request gets alone, and that one is what the API says."""

from kvrail.engine.request.events import Drafted, Output, Prefilled, Verified
from kvrail.text import IncrementalDetokenizer
from kvrail.values.sampling import FinishReason, SamplingParams
from tests.engine.mixes.asking import Ask, grammar, tokenizer
from tests.engine.mixes.machine import EOS
from tests.engine.mixes.site import Answer, Site, answer_of

BROKEN = "the engine failed"
NOT_FINITE = "no finite logits"
"""How a prompt for another worker ends that found poison in the cache: its pages are sent already."""


def compare(site: Site, ask: Ask) -> None:
    """Raise AssertionError unless a request got its answer; one whose client left or whose step broke, a beginning."""
    got, want = answer_of(site, ask.name, ask.params.n), ask.alone
    broken = got.failed is not None and (
        (BROKEN in str(got.failed) and site.trouble.broken > 0)
        or (NOT_FINITE in str(got.failed) and site.poisoned and ask.kind == "prefill")
    )
    if want.failed is not None:
        assert ask.gone or broken or str(got.failed) == str(want.failed), f"{got.failed!r} is not {want.failed!r}"
        return
    assert broken or got.failed is None, f"it failed: {got.failed!r}"
    if ask.kind == "prefill":
        _compare_first(site, ask, may_lack=ask.gone or broken)
        return
    whole = not ask.gone and not broken
    for index, sent in enumerate(ask.sent):
        _compare_sequence(got, want, index, sent, whole=whole)
    first = ask.options.get("scored", 0) + 1
    scores = [score for score in want.prompt if score[0] >= first]
    assert got.prompt == (scores if whole else scores[: len(got.prompt)]), f"scores {got.prompt} are not {scores}"
    if whole:
        total = sum(map(len, got.tokens))
        assert got.finished == total, f"{got.finished} tokens were counted, {total} came"
    _check_drafts(site, ask)


def _compare_first(site: Site, ask: Ask, *, may_lack: bool) -> None:
    done = site.of(ask.name, Prefilled)
    assert done or may_lack, "the prompt was not computed"
    for event in done:
        tokens, scores = [each.token_id for each in event.tokens], [each.logprobs for each in event.tokens]
        assert tokens == [each[0] for each in ask.alone.tokens], f"first tokens {tokens}"
        assert ask.params.logprobs is None or scores == [each[0] for each in ask.alone.logprobs], f"first {scores}"


def _compare_sequence(got: Answer, want: Answer, index: int, sent: int, *, whole: bool) -> None:
    """sent: its tokens that were told before it was resumed here, one piece of text each."""
    tokens, rest = got.tokens[index], want.tokens[index][sent:]
    if not whole:
        assert tokens == rest[: len(tokens)], f"sequence {index}: {tokens} is not a beginning of {rest}"
        return
    assert tokens == rest, f"sequence {index}: tokens {tokens} are not {rest}"
    text, told = "".join(want.pieces[index]), "".join([*want.pieces[index][:sent], *got.pieces[index]])
    assert told == text, f"sequence {index}: text {told!r} is not {text!r}"
    scores = want.logprobs[index][sent:]
    assert got.logprobs[index] == scores, f"sequence {index}: log probabilities {got.logprobs[index]} are not {scores}"
    if rest:
        assert got.ends[index] == want.ends[index], f"sequence {index}: it ends {got.ends[index]}, {want.ends[index]}"


def _check_drafts(site: Site, ask: Ask) -> None:
    """What a client that sees drafts relies on: a verdict is on drafts it knows, accepted ones are what comes next."""
    known: list[int] = []
    accepted: list[int] = []
    for event in site.events.get(ask.name, []):
        if isinstance(event, Drafted):
            known += event.token_ids
        elif isinstance(event, Verified):
            assert event.accepted <= event.proposed
            if ask.options["provisional"]:
                assert event.proposed <= len(known), f"{event.proposed} drafts were verified, {len(known)} told"
                accepted = known[: event.accepted]
            known = []
        elif isinstance(event, Output):
            assert not known, "drafts were neither confirmed nor withdrawn"
            for token in event.token_ids:
                assert not accepted or token == accepted.pop(0), "an accepted draft did not come"


def check_alone(answer: Answer, prompt: list[int], params: SamplingParams, context: int) -> None:
    """Raise AssertionError unless an answer ends where and as its request says, and has all scores that it asked for.

    context: the model's longest sequence.
    """
    if answer.failed is not None:
        return
    for index in range(params.n):
        _check_end(answer, index, params, room=min(params.max_tokens, context - len(prompt)))
        if answer.ends[index] == (FinishReason.LENGTH, ""):
            detokenizer = IncrementalDetokenizer(tokenizer(), prompt, params.skip_special_tokens)
            text = detokenizer.push(tuple(answer.tokens[index])) + detokenizer.flush()
            assert "".join(answer.pieces[index]) == text, f"text {answer.pieces[index]} is not {text!r}"
        assert params.logprobs is None or len(answer.logprobs[index]) == len(answer.tokens[index])
    if params.prompt_logprobs is not None:
        assert [score[0] for score in answer.prompt] == list(range(1, len(prompt)))


def _check_end(answer: Answer, index: int, params: SamplingParams, room: int) -> None:
    tokens, text, end = answer.tokens[index], "".join(answer.pieces[index]), answer.ends[index]
    assert end is not None, f"sequence {index} has no end"
    reason, cause = end
    heeds_eos = not params.ignore_eos or bool(params.grammar)
    ends = [at for at, token in enumerate(tokens) if (token == EOS and heeds_eos) or token in params.stop_token_ids]
    assert len(tokens) == room if reason is FinishReason.LENGTH else len(tokens) <= room
    if params.grammar:
        said = tokens[:-1] if tokens[-1] == EOS else tokens
        assert grammar(params.grammar).matcher().move_to(said) == len(said), f"{text!r} does not match the grammar"
    else:
        assert all(params.min_tokens <= at == len(tokens) - 1 for at in ends), f"it went on behind an end: {ends}"
    if reason is not FinishReason.STOP:
        return
    if not cause:
        assert tokens[-1] == EOS and heeds_eos
    elif cause.isdigit():
        assert tokens[-1] == int(cause) and tokens[-1] in params.stop_token_ids
    else:
        assert cause in params.stop and len(tokens) > params.min_tokens
        assert not params.include_stop_in_output or text.endswith(cause)
    if not params.min_tokens and not params.include_stop_in_output:
        assert not any(stop in text for stop in params.stop), f"a stop string is in {text!r}"
