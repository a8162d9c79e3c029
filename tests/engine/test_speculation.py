"""Drafts and their verification on the page machine: the output is the same as without drafts."""

from functools import partial

import pytest
from prometheus_client import CollectorRegistry

from kvrail.engine.batch.batch import SampledToken
from kvrail.engine.request.events import Admitted, Drafted, Failed, Finished, Output, Verified
from kvrail.values.sampling import FinishReason
from tests.engine.bench import Bench, Transfer
from tests.engine.page_machine import VOCAB, expected

PROMPT = list(range(40, 61))


@pytest.fixture(autouse=True, params=[False, True], ids=["in turn", "ahead"])
def ahead(request, monkeypatch) -> bool:
    """Whether steps are enqueued before the draws of earlier ones are known; then one more draft is in flight."""
    monkeypatch.setattr("tests.engine.test_speculation.Bench", partial(Bench, ahead=request.param))
    return request.param


def started(bench: Bench, name: str = "r", prompt: list[int] = PROMPT, **kwargs) -> Transfer:
    """A request that waits for its KV, with its first token."""
    bench.submit(name, prompt, remote=True, **kwargs)
    transfer = Transfer(bench, name, prompt)
    transfer.first()
    return transfer


def verdicts(bench: Bench, name: str = "r") -> list[tuple[int, int]]:
    return [(event.proposed, event.accepted) for event in bench.of(name, Verified)]


def sample(registry: CollectorRegistry, name: str) -> float:
    return registry.get_sample_value(name, {"model_name": "machine"})


@pytest.mark.parametrize("budget", [1, 3, 200])
@pytest.mark.parametrize("wrong", [True, False])
def test_output_is_that_without_drafts(wrong: bool, budget: int, ahead: bool) -> None:
    bench = Bench(num_pages=64, max_batch_tokens=budget)
    transfer = started(bench, max_tokens=90)
    assert not bench.engine.pending()
    transfer.coarse(wrong)
    bench.run()
    assert bench.tokens("r") == expected(PROMPT, 1), "an unverified token left the engine"
    assert bench.machine.steps == [[1]] * 64  # no more than max_drafts, one a step
    assert bench.machine.fed == 63 * ahead
    transfer.exact()
    bench.run()
    assert bench.tokens("r") == expected(PROMPT, 90)
    assert bench.events["r"][-1] == Finished(90)
    proposed = {1: 64, 3: 2, 200: 64}[budget]  # a budget that holds no draft beside the token drops all 64 unverified
    assert verdicts(bench) == [(proposed, 0 if wrong or budget == 1 else proposed)]
    assert bench.engine.status().pages.used == 0


def test_wrong_drafts_behind_right_ones(ahead: bool) -> None:
    bench = Bench(num_pages=64, max_batch_tokens=100)
    transfer = started(bench, max_tokens=90)
    transfer.coarse(wrong=False)
    bench.step(32)
    bench.machine.cells[transfer.lease.pages[0], 0] += 1
    bench.run()
    transfer.exact()
    bench.run()
    assert bench.tokens("r") == expected(PROMPT, 90)
    assert verdicts(bench) == [(64, 32 + ahead)]


def test_accepted_drafts_take_one_step() -> None:
    bench = Bench(num_pages=64, max_batch_tokens=100)
    transfer = started(bench, max_tokens=90)
    transfer.coarse(wrong=False)
    bench.run()
    before = len(bench.machine.steps)
    transfer.exact()
    bench.step(2)
    assert bench.machine.steps[before] == [65]
    assert bench.tokens("r") == expected(PROMPT, 1 + 64 + 1)


def test_drafting_may_begin_before_the_first_token() -> None:
    bench = Bench(num_pages=64)
    bench.submit("r", PROMPT, remote=True)
    transfer = Transfer(bench, "r", PROMPT)
    transfer.coarse()
    assert not bench.engine.pending()
    transfer.first()
    bench.run()
    assert bench.machine.steps == [[1]] * 7  # max_tokens 8
    transfer.exact()
    bench.run()
    assert bench.tokens("r") == expected(PROMPT, 8)


def test_exact_kv_before_any_draft_verifies_nothing() -> None:
    bench = Bench(num_pages=64)
    transfer = started(bench)
    transfer.coarse()
    transfer.exact()
    bench.run()
    assert bench.tokens("r") == expected(PROMPT, 8) and not verdicts(bench)


def test_drafting_can_be_turned_off() -> None:
    bench = Bench(num_pages=64, max_drafts=0)
    transfer = started(bench)
    transfer.coarse()
    assert not bench.engine.pending()
    transfer.exact()
    bench.run()
    assert bench.tokens("r") == expected(PROMPT, 8) and not verdicts(bench)


def test_max_drafts_counts_drafts() -> None:
    bench = Bench(num_pages=64, max_drafts=3)
    transfer = started(bench)
    transfer.coarse(wrong=False)
    bench.run()
    transfer.exact()
    bench.run()
    assert verdicts(bench) == [(3, 3)] and bench.tokens("r") == expected(PROMPT, 8)


def test_requests_for_several_sequences_do_not_draft() -> None:
    bench = Bench(num_pages=64)
    bench.submit("r", PROMPT, remote=True, n=2)
    transfer = Transfer(bench, "r", PROMPT)
    first = expected(PROMPT, 1)[0]
    with bench.engine.change() as requests:
        requests.receive_first_tokens("r", [SampledToken(first), SampledToken((first + 1) % VOCAB)])
    transfer.coarse()
    assert not bench.engine.pending()
    transfer.exact()
    bench.run()
    assert [bench.tokens("r", i) for i in range(2)] == [expected(PROMPT, 8, i) for i in range(2)]


@pytest.mark.parametrize("exact_at", [2, 30])
def test_drafts_end_where_the_output_would(exact_at: int, ahead: bool) -> None:
    """By a stop token, by max_tokens and by the model's context; the draft that would end it is the last."""
    tokens = expected(PROMPT, 90)
    cut = next(i for i in range(5, 20) if tokens[i] not in tokens[:i])
    cases = [({"stop_token_ids": (tokens[cut],)}, cut + 1), ({"max_tokens": 9}, 9)]
    for options, count in cases:
        bench = Bench(num_pages=64, max_batch_tokens=100)
        transfer = started(bench, **{"max_tokens": 90, **options}, provisional=True)
        transfer.coarse(wrong=False)
        bench.step(exact_at)
        transfer.exact()
        bench.run()
        assert bench.tokens("r") == tokens[:count]
        assert verdicts(bench) == [(min(exact_at + ahead, count - 1),) * 2]
        assert bench.events["r"][-1] == Finished(count)
    long = [1] * 110
    bench = Bench(num_pages=64, max_batch_tokens=100)
    transfer = started(bench, prompt=long, max_tokens=90)
    transfer.coarse(wrong=False)
    bench.run()
    transfer.exact()
    bench.run()
    assert bench.tokens("r") == expected(long, 10) and verdicts(bench) == [(9, 9)]
    assert bench.of("r", Output)[-1].finish_reason is FinishReason.LENGTH


def test_provisional_requests_get_their_drafts(ahead: bool) -> None:
    bench = Bench(num_pages=64, max_batch_tokens=100)
    transfer = started(bench, max_tokens=40, provisional=True)
    silent = started(bench, "silent", PROMPT[::-1], max_tokens=40)
    for each in (transfer, silent):
        each.coarse(wrong=False)
    bench.step(6)
    transfer.exact()
    silent.exact()
    bench.run()
    kinds = [type(event) for event in bench.events["r"]]
    drafted = [token for event in bench.of("r", Drafted) for token in event.token_ids]
    assert drafted == expected(PROMPT, 7 + ahead)[1:]
    assert verdicts(bench) == [(6 + ahead,) * 2] and bench.tokens("r") == expected(PROMPT, 40)
    verified = kinds.index(Verified)
    assert Drafted not in kinds[verified:] and kinds[:verified].count(Output) == 1
    assert not bench.of("silent", Drafted) and bench.tokens("silent") == expected(PROMPT[::-1], 40)


def drop(transfer: Transfer) -> None:
    with transfer.bench.engine.change() as requests:
        requests.drop_drafts("r")


def drop_and_draft_again(transfer: Transfer) -> None:
    drop(transfer)
    transfer.coarse(wrong=False)


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 5, 64])
@pytest.mark.parametrize("change", [Transfer.exact, Transfer.lose, drop, drop_and_draft_again])
def test_the_transfer_may_report_at_any_moment(change, steps: int, in_flight: bool) -> None:
    bench = Bench(num_pages=64, max_batch_tokens=100)
    transfer = started(bench, max_tokens=80, provisional=True)
    transfer.coarse(wrong=True)
    bench.step(steps)
    if in_flight and bench.scheduler.has_work():
        bench.machine.meanwhile = partial(once, bench, partial(change, transfer))
        bench.engine.step()
    else:
        change(transfer)
    bench.run()
    if change in (drop, drop_and_draft_again):
        assert bench.tokens("r") == expected(PROMPT, 1)
        transfer.exact()
        bench.run()
    if change is drop_and_draft_again:
        assert verdicts(bench)[-1] == (64, 64), "drafts of before were among those of after"
    assert bench.tokens("r") == expected(PROMPT, 80)
    events = bench.events["r"]
    heard = 0  # every draft that was heard is confirmed or withdrawn before any output
    for event in events:
        if isinstance(event, Verified):
            assert event.accepted <= heard <= event.proposed
            heard = 0
        heard += isinstance(event, Drafted)
        assert not (isinstance(event, Output) and heard)
    assert bench.engine.status().pages.used == 0


def once(bench: Bench, change) -> None:
    bench.machine.meanwhile = lambda: None
    change()


@pytest.mark.parametrize("when", ["drafting", "in flight", "before verification", "verifying"])
def test_abort_returns_everything(when: str) -> None:
    bench = Bench(num_pages=64, max_batch_tokens=100)
    transfer = started(bench, max_tokens=80)
    transfer.coarse()
    bench.step(5)
    abort = partial(bench.engine.abort, "r")
    if when == "in flight":
        bench.machine.meanwhile = partial(once, bench, abort)
        bench.engine.step()
    if when in ("before verification", "verifying"):
        transfer.exact()
    if when == "verifying":
        bench.machine.meanwhile = partial(once, bench, abort)
        bench.engine.step()
    abort()
    bench.run()
    if when in ("drafting", "in flight"):
        assert bench.engine.status().pages.used == len(transfer.lease.pages)
        transfer.release()
    bench.engine.check()
    assert bench.engine.status().pages.used == 0 and len(bench.tokens("r")) == 1


def test_a_failing_step_fails_drafting_requests() -> None:
    bench = Bench(num_pages=64)
    transfer = started(bench)
    transfer.coarse()
    bench.machine.execute = lambda *a: (_ for _ in ()).throw(RuntimeError("device"))
    bench.engine.step()
    assert bench.of("r", Failed)
    transfer.release()
    bench.engine.check()


def test_pages_that_hold_guesses_are_never_served_to_others() -> None:
    bench = Bench(num_pages=64, max_batch_tokens=100)
    transfer = started(bench, max_tokens=60)
    transfer.coarse(wrong=True)
    bench.step(20)
    first = expected(PROMPT, 1)
    bench.submit("meanwhile", [*PROMPT, *first, 1])
    bench.engine.step()
    assert bench.of("meanwhile", Admitted)[0].cached_tokens == 0
    transfer.exact()
    bench.engine.step()
    for name, tail in (("right", expected(PROMPT, 20)), ("wrong", [*first, *[5] * 20])):
        bench.submit(name, [*PROMPT, *tail])
    bench.run()
    assert bench.of("right", Admitted)[0].cached_tokens >= 20
    assert bench.tokens("meanwhile") == expected([*PROMPT, *first, 1], 8)
    assert bench.tokens("right") == expected([*PROMPT, *expected(PROMPT, 20)], 8)
    assert bench.tokens("wrong") == expected([*PROMPT, *first, *[5] * 20], 8)
    assert bench.tokens("r") == expected(PROMPT, 60)


def test_accepted_drafts_are_cached_for_the_next_turn() -> None:
    bench = Bench(num_pages=64, max_batch_tokens=100)
    transfer = started(bench, max_tokens=41)
    transfer.coarse(wrong=False)
    bench.run()
    transfer.exact()
    bench.run()
    turn = [*PROMPT, *expected(PROMPT, 41), 3]
    bench.submit("next", turn)
    bench.run()
    assert bench.of("next", Admitted)[0].cached_tokens == 60  # all full pages of prompt and output
    assert bench.tokens("next") == expected(turn, 8)


def test_drafts_give_up_their_pages_before_a_sequence_is_preempted() -> None:
    bench = Bench(num_pages=16, prefix_cache=False, max_batch_tokens=100)
    transfer = started(bench, max_tokens=30, provisional=True)  # 6 pages for the prompt
    transfer.coarse()
    bench.step(12)
    assert bench.engine.status().pages.used == 9
    bench.submit("talker", [1, 2, 3, 4], max_tokens=32)  # 9 pages in all, 7 are free
    bench.run()
    assert bench.tokens("talker") == expected([1, 2, 3, 4], 32) and bench.scheduler.preemptions == 0
    (withdrawn,) = verdicts(bench)
    assert withdrawn[1] == 0 and withdrawn[0] == len(bench.of("r", Drafted)) >= 12
    assert bench.engine.status().pages.used == 6
    transfer.exact()
    bench.run()
    assert bench.tokens("r") == expected(PROMPT, 30)


def test_no_page_for_a_draft_means_no_draft() -> None:
    bench = Bench(num_pages=10, prefix_cache=False, max_batch_tokens=100)
    transfer = started(bench, max_tokens=19)
    other = started(bench, "s", [9] * 16, max_tokens=19)  # all pages are held
    transfer.coarse(wrong=False)
    other.coarse(wrong=False)
    bench.run()
    assert len(bench.machine.steps) == 3  # "r" has three slots behind its prompt, "s" has none
    transfer.exact()
    other.exact()
    bench.run()
    assert bench.tokens("r") == expected(PROMPT, 19) and bench.tokens("s") == expected([9] * 16, 19)


def test_verification_waits_its_turn_and_never_starves() -> None:
    """Four verifications of 11 tokens in a budget of 20, beside a talker and a long prompt."""
    bench = Bench(num_pages=300, max_batch_tokens=20, max_drafts=10)
    asked = {str(i): [i, *PROMPT] for i in range(4)}
    transfers = [started(bench, name, prompt, max_tokens=30) for name, prompt in asked.items()]
    for transfer in transfers:
        transfer.coarse(wrong=False)
    bench.submit("talker", [7], max_tokens=60)
    bench.step(12)
    bench.submit("reader", [3] * 100, max_tokens=2)
    for transfer in transfers:
        transfer.exact()
    bench.run()
    for name, prompt in asked.items():
        assert bench.tokens(name) == expected(prompt, 30) and verdicts(bench, name) == [(10, 10)]
    assert bench.tokens("talker") == expected([7], 60) and bench.tokens("reader") == expected([3] * 100, 2)
    assert max(sum(step) for step in bench.machine.steps) <= 20


def test_metrics_count_verified_drafts(ahead: bool) -> None:
    bench = Bench(num_pages=64, max_batch_tokens=100)
    transfer = started(bench, max_tokens=30)
    transfer.coarse(wrong=False)
    bench.step(5)
    bench.machine.cells[transfer.lease.pages[0], 0] += 1
    bench.step(4)
    transfer.exact()
    bench.run()
    assert sample(bench.registry, "kvrail_engine_drafts_proposed_total") == 9 + ahead
    assert sample(bench.registry, "kvrail_engine_drafts_accepted_total") == 5 + ahead
    assert sample(bench.registry, "kvrail_engine_accepted_drafts_sum") == 5 + ahead
    assert sample(bench.registry, "kvrail_engine_generation_tokens_total") == 29  # the first was drawn elsewhere
