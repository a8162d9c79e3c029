"""The policy's decisions, which need no network."""

from collections import Counter
from dataclasses import replace

import pytest

from kvrail.services.router.fleet.compatibility import Identity, choose_fingerprint, codec_mismatch, incompatibility
from kvrail.services.router.fleet.policy import (
    POLICIES,
    Candidate,
    Load,
    PlacementRequest,
    WorkerState,
    cached_tokens,
    choose,
)

ASK = PlacementRequest(prompt_tokens=2048, pages=range(32), page_size=64, output_tokens=128)


def worker(target: str, state: WorkerState = WorkerState.HEALTHY, holds=(), **load: float) -> Candidate:
    return Candidate(target, state, Load(**({"max_running": 8} | load)), frozenset(holds))


def order(policy: str, ask: PlacementRequest, *candidates: Candidate) -> list[str]:
    return [placement.target for placement in POLICIES[policy].rank(ask, candidates)]


@pytest.mark.parametrize("policy", POLICIES)
def test_only_healthy_workers_and_those_without_room_last(policy: str):
    others = [worker(state.value, state) for state in WorkerState if state is not WorkerState.HEALTHY]
    assert order(policy, ASK, *others, worker("one", sequences=9)) == ["one"]
    assert order(policy, ASK, *others) == ["failing"]  # rather than none
    assert order(policy, ASK, *(each for each in others if each.state is not WorkerState.FAILING)) == []
    full, refused = worker("full", sequences=8, holds=range(32)), worker("refused", refused=True)
    for number in range(8):
        ask = replace(ASK, number=number, draw=number * 0x100000001)
        ranked = order(policy, ask, full, worker("busy", sequences=7, backlog=10**6), refused)
        assert ranked[0] == "busy" and sorted(ranked) == ["busy", "full", "refused"]


@pytest.mark.parametrize("policy", ["least-load", "prefix-aware"])
def test_fewest_sequences_first(policy: str):
    load = {"sequence_s": 1e-3, "token_s": 1e-4}
    busy, sent, idle = worker("busy", sequences=3, **load), worker("sent", sequences=2, **load), worker("idle", **load)
    assert order(policy, ASK, busy, sent, idle) == ["idle", "sent", "busy"]


def test_equals_by_free_pages_then_by_order():
    assert order("least-load", ASK, worker("a", pages_free=1), worker("b", pages_free=2)) == ["b", "a"]
    assert order("least-load", ASK, worker("a"), worker("b")) == ["a", "b"]


def test_one_after_the_other():
    workers = [worker(name) for name in "abc"]
    assert [order("round-robin", replace(ASK, number=n), *workers)[0] for n in range(5)] == list("abcab")


def test_of_two_that_are_drawn_the_less_busy():
    workers = [worker(f"w{n}", sequences=n) for n in range(8)]
    draws = [(first | second << 32) for first in range(8) for second in range(7)]
    firsts = Counter(order("power-of-two", replace(ASK, draw=draw), *workers[:7])[0] for draw in draws)
    assert firsts["w0"] > firsts["w3"] > firsts["w6"] == 0  # the busiest of all loses each pair


def test_a_prefix_is_worth_what_it_saves_and_no_more():
    token_s = 1e-4
    idle, holder = worker("idle", token_s=token_s), worker("holder", token_s=token_s, holds=range(20), backlog=1)
    chosen = POLICIES["prefix-aware"].rank(ASK, [idle, holder])[0]
    assert (chosen.target, chosen.reason, chosen.cached_tokens) == ("holder", "prefix", 1280)
    for backlog, best in ((1279, "holder"), (1281, "idle")):  # tokens that wait there, against those that it holds
        hot = replace(holder, load=replace(holder.load, backlog=backlog))
        assert order("prefix-aware", ASK, idle, hot)[0] == best
    placement = POLICIES["prefix-aware"].rank(ASK, [idle, replace(holder, load=replace(holder.load, backlog=9999))])[0]
    assert placement.reason == "load"
    slow = replace(holder, load=replace(holder.load, token_s=10 * token_s))
    assert order("prefix-aware", ASK, idle, slow)[0] == "idle"


def test_the_one_that_has_begun_earlier_ends_first():
    rates = {"token_s": 1e-4, "backlog": 2000}
    assert order("prefix-aware", ASK, worker("a", **rates), worker("b", **rates, computing_s=0.1)) == ["b", "a"]


def test_only_leading_pages_count_and_the_last_token_never():
    assert cached_tokens(ASK, worker("a", holds=[0, 1, 3, 4])) == 128
    assert cached_tokens(ASK, worker("a", holds=range(1, 32))) == 0
    assert cached_tokens(ASK, worker("a", holds=range(32))) == 2047


def test_equal_workers_get_prompts_that_begin_alike():
    workers = [worker(f"w{n}") for n in range(8)]
    firsts = {seed: order("prefix-aware", replace(ASK, pages=[seed, 5], draw=1), *workers)[0] for seed in range(400)}
    for seed, first in firsts.items():
        assert order("prefix-aware", replace(ASK, pages=[seed, 6], draw=2), *workers)[0] == first
    assert all(30 <= count <= 80 for count in Counter(firsts.values()).values())  # about 50 of 400 each
    assert len({order("prefix-aware", PlacementRequest(3, draw=draw), *workers)[0] for draw in range(100)}) == 8


def test_fingerprint_of_the_most_decode_workers():
    assert choose_fingerprint("", [], []) == ""
    assert choose_fingerprint("", [], ["x", "y", "y"]) == "y"
    assert choose_fingerprint("old", [], ["y", "y"]) == "old"
    assert choose_fingerprint("", ["x", "y"], []) == "x"
    assert choose_fingerprint("y", ["x", "y"], ["x"]) == "y"
    assert choose_fingerprint("x", ["x", "y", "y"], []) == "y"


def test_incompatibility_names_what_differs():
    fits = {"model": "m", "fingerprint": "f", "protocol_version": 1}
    assert incompatibility(Identity("m", "f", 1), **fits) == ""
    assert "model 'other'" in incompatibility(Identity("other", "f", 1), **fits)
    assert "fingerprint 'g'" in incompatibility(Identity("m", "g", 1), **fits)
    assert "protocol 2" in incompatibility(Identity("m", "f", 2), **fits)


def test_a_codec_of_other_parameters_than_any_decode_worker_has_is_named():
    assert codec_mismatch({"raw": 0, "splitzip": 5}, []) == ""
    assert codec_mismatch({"raw": 0, "splitzip": 5}, [{"splitzip": 6}, {"splitzip": 5}]) == ""
    assert codec_mismatch({"raw": 0, "splitzip": 5}, [{"raw": 0}]) == ""
    assert "000000000000000c of codec 'splitzip'" in codec_mismatch({"splitzip": 12}, [{"splitzip": 6}])


def test_prompts_are_handed_out_as_they_are_computed():
    """Until two steps are full, however long the last one is; a client's only one waits for nobody."""
    ask = replace(ASK, prompt_tokens=2048)
    decode = [worker("d", token_s=1e-6)]

    def chosen(*prefill: Candidate, urgent: bool = False, asked: PlacementRequest = ask) -> list[str] | None:
        choice = choose(POLICIES["prefix-aware"], asked, decode, prefill, urgent=urgent)
        return None if choice is None else [choice.decode.target, *(each.target for each in choice.prefill)]

    busy, later = worker("busy", step_tokens=2048, backlog=4096), worker("later", step_tokens=2048, backlog=4095)
    assert chosen(busy) is None
    assert chosen(busy, urgent=True) == ["d", "busy"]
    assert chosen(later) == ["d", "later"]
    assert chosen(busy, later) == ["d", "later", "busy"]
    assert chosen(worker("idle", step_tokens=256)) == ["d", "idle"]  # however long it is
    assert chosen() == ["d"]
    assert choose(POLICIES["prefix-aware"], ask, [replace(busy, target="d")], [], urgent=False) is None
    assert choose(POLICIES["prefix-aware"], ask, [worker("d", sequences=8)], [later], urgent=True) is None
    many = replace(ask, n=64)
    assert choose(POLICIES["prefix-aware"], many, [worker("d", sequences=2)], [], urgent=True) is None
    assert choose(POLICIES["prefix-aware"], many, [worker("d", sequences=1)], [], urgent=True) is not None


def test_a_decode_worker_computes_what_would_wait_too_long():
    """Where it has time and would be sooner; a prompt that still may wait waits, and what has a worker goes there."""
    ask, costs = replace(ASK, prompt_tokens=4096, pages=()), {"compute_s": 1e-4, "step_tokens": 2048}
    busy, idle = worker("busy", backlog=8192, **costs), worker("idle", **costs)  # 0.82 s of work, and none

    def chosen(
        *decode: Candidate, spare_s: float, urgent: bool = False, prefill=(busy,), asked: PlacementRequest = ask
    ):
        choice = choose(POLICIES["least-load"], asked, decode, prefill, urgent=urgent, spare_s=spare_s)
        return (
            None if choice is None else (choice.decode.target, choice.decode.reason, [p.target for p in choice.prefill])
        )

    here = worker("d", **costs)
    assert chosen(here, spare_s=0.8) == ("d", "overflow", [])
    assert chosen(here, spare_s=-1.0) == ("d", "overflow", [])  # it has waited here, too
    assert chosen(here, spare_s=0.8, urgent=True) == ("d", "overflow", [])
    assert chosen(here, spare_s=0.9) is None
    assert chosen(here, spare_s=0.9, urgent=True) == ("d", "load", ["busy"])
    assert chosen(here, spare_s=-1.0, prefill=(busy, idle)) == ("d", "load", ["idle", "busy"])
    assert chosen(here, spare_s=-1.0, asked=replace(ask, local=True)) == ("d", "load", [])
    engaged = worker("d", **costs, backlog=4096)
    assert chosen(engaged, spare_s=-1.0) is None
    assert chosen(engaged, worker("e", **costs, sequences=1), spare_s=-1.0) == ("e", "overflow", [])
    assert chosen(worker("d", sequences=8, **costs), spare_s=-1.0) is None
    slow = worker("d", **costs | {"compute_s": 3.1e-4})  # 1.27 s, where the other has done all in 1.23 s
    assert chosen(slow, spare_s=-1.0) is None
    assert chosen(worker("d", **costs | {"compute_s": 2.9e-4}), spare_s=-1.0) == ("d", "overflow", [])
    assert chosen(worker("d", step_tokens=2048), spare_s=0.8) == ("d", "overflow", [])  # not measured: as the other
    assert chosen(here, spare_s=0.0, prefill=(worker("busy", backlog=8192, step_tokens=2048),)) is None
    assert chosen(here, spare_s=-1.0, prefill=()) == ("d", "load", [])
