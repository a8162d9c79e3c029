"""Where prompts are computed and decoded among workers of both roles."""

import math
from dataclasses import replace

import pytest

from kvrail.services.router.fleet.policy import POLICIES, Candidate, Load, PlacementRequest, WorkerState, choose
from kvrail.services.router.fleet.split import LONGER, STAYS_LONGER, Fleet, best_split
from kvrail.services.router.fleet.ways import APART, BUSY_WAIT, HERE, MARGIN, Slo, Snapshot, _Cost, _way, choose_way

AWARE = POLICIES["prefix-aware"]
LOAD = Load(
    max_running=64,
    pages_free=1000,
    token_s=25e-6,
    compute_s=25e-6,
    sequence_s=18e-6,
    step_tokens=2048,
    fetch_s=3e-6,
    step_s=5e-3,
    chunk_tokens=512,
)
PROMPT = PlacementRequest(2000, output_tokens=128)


def worker(name, state=WorkerState.HEALTHY, holds=(), **load):
    load.setdefault("recent_per_s", load.get("tokens_per_s", 0.0))
    return Candidate(name, state, replace(LOAD, **load), frozenset(holds))


def way(*both, request=PROMPT, prefill=(), decode=(), policy=AWARE, urgent=False, split=None, slo=None, spare_s=1.0):
    both = list(both)
    workers = Snapshot([*decode, *both], [*prefill, *both], slo or Slo(), split)
    choice = choose_way(policy, request, workers, urgent=urgent, spare_s=spare_s)
    if choice is None:
        return None
    return choice.decode.target, [each.target for each in choice.prefill], choice.way


def test_no_worker_fetches_from_itself():
    assert way(worker("a", tokens_per_s=9_000), split=1) == ("a", [], (HERE, "only"))


def test_an_idle_worker_does_both():
    assert way(worker("a"), worker("b"))[1:] == ([], (HERE, "cost"))


def test_a_prompt_does_not_delay_sequences_where_another_worker_has_none():
    target, prefill, (found, _) = way(worker("a"), worker("b", sequences=40), worker("c", sequences=40))
    assert "a" in (target, *prefill[:1]) and (found == HERE or prefill[0] == "a")
    busy = worker("a", tokens_per_s=24_000)  # prompts come there all the time: output is for another
    assert way(busy, worker("b", sequences=20)) == ("b", ["a"], (APART, "cost"))


def test_a_backlog_is_passed_by():
    assert way(worker("a", backlog=1900), worker("b"))[:2] == ("b", [])


def test_limits_come_before_cost():
    late = worker("a", backlog=1000, compute_s=1e-3, token_s=1e-3)
    others = worker("b", sequences=30, compute_s=1e-3, token_s=1e-4)
    assert way(late, worker("b", sequences=60), urgent=True)[0] == "b"
    assert way(late, others, urgent=True) is not None
    halting = worker("b", sequences=1, chunk_tokens=2048)
    assert way(halting, worker("a", backlog=2000), slo=Slo(0.5, 0.03))[2][1] in ("gap", "cost")


def test_no_room_and_no_time():
    full = worker("a", sequences=64)
    assert way(full, full) is None
    deep = [worker(name, backlog=4096) for name in "ab"]
    assert way(*deep) is None
    assert way(*deep, urgent=True) is not None
    assert way(full, worker("b"))[:2] == ("b", [])


def test_a_worker_that_decodes_helps_with_what_waits_too_long():
    """Prompts are split off to a, which has two steps of them; b decodes."""
    deep, decoding = worker("a", backlog=4096, tokens_per_s=36_000), worker("b", sequences=60)

    def found(*both, spare_s=0.05):
        return way(*both, split=1, spare_s=spare_s)

    assert found(deep, decoding) == ("b", [], (HERE, "ttft"))
    assert found(deep, decoding, spare_s=0.15) is None  # a takes it up in time
    assert found(deep, replace(decoding, load=replace(decoding.load, backlog=4096))) is None
    assert found(deep, worker("b", sequences=60, compute_s=1e-4)) is None  # a ends it sooner
    assert found(deep, worker("b", sequences=64)) is None
    assert found(worker("a", backlog=2000, tokens_per_s=36_000), decoding)[:2] == ("b", ["a"])


def test_cached_pages_attract():
    request = replace(PROMPT, pages=tuple(range(31)))
    assert way(worker("a"), worker("b", holds=range(31)), request=request)[:2] == ("b", [])


def test_log_probabilities_of_the_prompt_are_computed_where_it_decodes():
    request = replace(PROMPT, local=True)
    busy = worker("a", tokens_per_s=24_000)
    assert way(busy, worker("b", sequences=20), request=request)[1:] == ([], (HERE, "only"))


def test_workers_of_one_role_beside_those_of_both():
    only = worker("p"), worker("d")
    target, prefill, _ = way(worker("a", sequences=64), prefill=only[:1], decode=only[1:])
    assert (target, prefill[0]) == ("d", "p")
    assert way(worker("a"), prefill=only[:1])[0] == "a"  # p never decodes
    target, prefill, _ = way(worker("a"), decode=only[1:])
    assert target == "a" or prefill == ["a"]  # d never computes


@pytest.mark.parametrize("policy", POLICIES)
def test_without_workers_of_both_roles_it_is_the_policy(policy):
    decode, prefill = [worker("d", sequences=3), worker("e")], [worker("p", backlog=100), worker("q")]
    for urgent in (False, True):
        for backlog in (0, 5000):
            loaded = [replace(each, load=replace(each.load, backlog=backlog)) for each in prefill]
            plain = choose(POLICIES[policy], PROMPT, decode, loaded, urgent=urgent, spare_s=0.01)
            workers = Snapshot(decode, loaded, Slo())
            found = choose_way(POLICIES[policy], PROMPT, workers, urgent=urgent, spare_s=0.01)
            assert found == plain


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "prefix-aware"])
def test_other_policies_compute_prompts_where_they_decode(policy):
    assert way(worker("a"), worker("b"), policy=POLICIES[policy])[1:] == ([], (HERE, "policy"))


def test_a_failing_worker_is_used_only_alone():
    failing = worker("a", state=WorkerState.FAILING)
    assert way(failing, worker("b", sequences=10))[:2] == ("b", [])
    assert way(failing)[:2] == ("a", [])


def keeping(form, name, **load):
    return replace(worker(name, **load), kv_cache=form)


@pytest.mark.parametrize("policy", POLICIES)
def test_pages_are_compared_where_it_decodes(policy):
    def found(kv_cache, *both, **others):
        request = replace(PROMPT, kv_cache=kv_cache)
        choice = way(*both, request=request, policy=POLICIES[policy], **others)
        return choice and choice[:2]

    both, lossy = worker("a", sequences=9), keeping("int4", "d")
    assert found("exact", both, decode=[lossy])[0] == "a"
    assert found("int4", both, decode=[lossy]) == ("d", ["a"])
    assert found("int8", both, decode=[lossy]) is None
    assert found("exact", decode=[lossy, keeping("lossless", "e", sequences=9)], prefill=[worker("p")]) == ("e", ["p"])
    # A worker of both roles that fails is the last that keeps exact pages: nobody else computes, and not it for itself.
    failing = replace(both, state=WorkerState.FAILING)
    assert found("exact", failing, decode=[lossy]) == ("a", [])
    assert found("exact", failing, decode=[lossy], prefill=[worker("p")]) == ("a", ["p"])


def two(prompts, sequences, **fleet):
    """Two workers as H100s are with a model of 8B."""
    sizes = {"decoding": 2, "both": 2, "prefill": 0, "recent": prompts} | fleet
    return Fleet(**sizes, prompts=prompts, sequences=sequences, step_s=6.6e-3, sequence_s=50e-6)


@pytest.mark.parametrize(
    ("prompts", "sequences", "wait_s", "better"),
    [
        (0.03, 1, 0.0, None),  # 1,024 tokens in, 128 out: 1 stream
        (0.21, 7, 0.01, 1),  # 8 streams
        (0.38, 15, 0.01, 1),  # 16
        (0.65, 30, 0.03, 1),  # 32
        (0.97, 60, 0.44, None),  # 64
        (1.25, 120, 1.1, None),  # 128
        (0.10, 63, 0.1, None),  # 256 in, 512 out: 64 streams
        (1.16, 60, 7.4, None),  # 4,000 in, 64 out: 64 streams
        (0.95, 8, 0.8, None),  # 8,000 in, 128 out: 8 streams
    ],
)
def test_prompts_have_the_workers_that_served_best_on_two_gpus(prompts, sequences, wait_s, better):
    """The better layout of each load, measured: benchmarks/results/roles-2026-11-28-2xh100.md. wait_s: the pair's."""
    assert best_split(two(prompts, sequences), None, 0.5) == better
    assert best_split(two(prompts, sequences, wait_s=wait_s), 1, 0.5) == better


def test_a_load_that_varies_changes_no_roles():
    for prompts in (0.87, 0.94, 1.04):
        assert [best_split(two(prompts, 30), before) for before in (None, 1)] == [None, 1]
    eight = {"decoding": 8, "both": 8}
    for prompts in (2.2, 2.4):  # of 8 workers, between what 3 and 4 compute
        assert [best_split(two(prompts, 99, **eight), before) for before in (3, 4)] == [3, 4]
    assert best_split(two(1.2, 99, **eight), 4) == 2
    nearly = two(0.1, 4)
    assert nearly.apart_s(1) < nearly.together_s() < LONGER * nearly.apart_s(1)
    assert [best_split(nearly, before) for before in (None, 1)] == [None, 1]


def test_workers_with_little_to_spare_compute_for_all_while_prompts_do_not_wait():
    """As they hardly do in a closed loop; where prompts wait, or are too many, all workers compute them."""
    for prompts, wait_s, found in ((1.04, 0.15, 1), (1.04, 0.35, None), (1.06, 0.0, None), (0.65, 0.35, 1)):
        assert best_split(two(prompts, 60, wait_s=wait_s), 1, ttft_s=0.5) == found


def test_a_load_that_rises_or_falls_is_not_split():
    """Half a worker's prompts are split off, but not on the way from few to many, or from many to few."""
    assert [best_split(two(0.5, 40, recent=recent), None) for recent in (0.1, 0.5, 1.1)] == [None, 1, None]
    assert [best_split(two(0.5, 40, recent=recent), 1) for recent in (0.1, 0.5, 1.1)] == [1, 1, 1]


def test_one_worker_too_many_gives_way_to_fewer_not_to_all():
    eight = two(1.0, 267, decoding=8, both=8)
    assert eight.apart_s(2) * STAYS_LONGER < eight.together_s() < eight.apart_s(3)
    assert best_split(eight, 2) == best_split(eight, 3) == best_split(eight, 4) == 2


def test_one_more_worker_computes_prompts_early_where_gaps_hardly_get_longer():
    """Of eight, three would do as long as prompts do not wait; the fourth costs the others 3 % with few sequences."""
    eight = {"decoding": 8, "both": 8}
    assert best_split(two(2.7, 99, **eight), 3, 0.5) == 4
    assert best_split(two(2.7, 400, **eight), 3, 0.5) == 3
    assert best_split(two(2.7, 400, **eight, wait_s=0.35), 3, 0.5) == 4


def test_prompts_wait_in_the_queue_and_at_the_workers_that_compute_them():
    def split(waited_s, backlog, kind=""):
        """Of two workers, of which the first one has computed the prompts; the second one has nothing to do."""
        first = worker("a", tokens_per_s=36_000, backlog=backlog)
        return Snapshot(*[[first, worker("b", sequences=30)]] * 2, Slo(), 1, {kind: waited_s}).kind("").split

    assert split(0.0, 0) == split(0.0, 4_000) == split(0.15, 0) == 1
    assert split(0.0, 16_000) is split(0.35, 0) is split(0.2, 4_000) is None
    assert split(9.0, 0, kind="int4") == 1  # they wait for other workers


def test_prompts_wait_less_for_workers_that_have_no_time_to_spare():
    """Those that others compute count too: with help, prefill workers are given no more than they can compute."""

    def patience_s(*prefill, helped=0):
        helping = worker("d", tokens_per_s=helped, recent_per_s=0)
        return Snapshot([helping], prefill, Slo()).patience_s(0.2)

    assert patience_s(worker("p", tokens_per_s=20_000, recent_per_s=60_000)) == BUSY_WAIT * 0.2  # a wave
    assert patience_s(worker("p", tokens_per_s=36_000)) == 0.2
    assert patience_s(worker("p", tokens_per_s=36_000), helped=4_000) == BUSY_WAIT * 0.2
    assert patience_s(worker("p", tokens_per_s=36_000), worker("q"), helped=4_000) == 0.2
    gone = worker("q", state=WorkerState.DOWN)
    assert patience_s(worker("p", tokens_per_s=36_000), gone, helped=4_000) == BUSY_WAIT * 0.2
    assert patience_s() == 0.2
    both = [worker("a", tokens_per_s=40_000), worker("b", tokens_per_s=0, recent_per_s=0)]
    waits = {split: Snapshot(both, both, Slo(), split).patience_s(0.2) for split in (None, 1, 2)}
    assert waits == {None: 0.2, 1: BUSY_WAIT * 0.2, 2: 0.2}  # by those that are to compute prompts
    assert Snapshot([], [worker("p", tokens_per_s=90_000)], Slo()).patience_s(math.inf) == math.inf


def test_a_limit_of_gaps_comes_before_the_mean_gap():
    fleet = two(0.5, 120)
    assert fleet.apart_s(1) > 12e-3 > fleet.together_s()
    assert best_split(fleet, 1, gap_s=12e-3) is None
    fleet = two(0.6, 40)
    assert fleet.together_s() > 9e-3 > fleet.apart_s(1)
    assert best_split(fleet, None, gap_s=9e-3) == 1


def test_prefill_workers_beside_them_come_first():
    assert best_split(two(0.5, 30, prefill=1), None) == 0
    assert best_split(two(1.1, 30, prefill=1), None) == 1
    assert best_split(two(0.5, 0, decoding=1, both=1), None) is None  # nobody else would decode


def test_prompts_wait_for_the_workers_that_compute_them():
    deep = worker("a", tokens_per_s=24_000, backlog=4096)
    other = worker("b", sequences=20)
    assert way(deep, other) is None
    assert way(deep, other, spare_s=-0.1)[:2] == ("b", [])
    assert way(deep, other, urgent=True)[1] == ["a"]
    cached = replace(PROMPT, pages=tuple(range(31)))
    here = worker("b", sequences=2, holds=range(31))
    assert way(replace(deep, load=replace(deep.load, backlog=0)), here, request=cached)[:2] == ("b", [])
    late = replace(deep, load=replace(deep.load, backlog=30_000))
    assert way(late, other, urgent=True)[:2] == ("b", [])


def test_equal_costs_keep_the_way():
    for usual in (HERE, APART):
        for other in (1.0, 1 + MARGIN / 2, 1 / (1 + MARGIN / 2)):
            assert _way(_Cost(0, 1.0), _Cost(0, other), usual)[0] == usual
    assert _way(_Cost(0, 1.5), _Cost(0, 1.0), HERE) == (APART, "cost")
    assert _way(_Cost(0, 1.0), _Cost(0, 1.5), APART) == (HERE, "cost")
    assert _way(_Cost(1, 1.0, late=True), _Cost(0, 9.0), HERE) == (APART, "ttft")
    assert _way(_Cost(1, 1.0), _Cost(0, 9.0), HERE) == (APART, "gap")
