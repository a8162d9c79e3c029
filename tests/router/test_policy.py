"""The policy's decisions, which need no network."""

from services.router.policy import (
    Candidate,
    Identity,
    Load,
    WorkerState,
    choose_fingerprint,
    codec_mismatch,
    incompatibility,
    order_workers,
)


def worker(target: str, state: WorkerState = WorkerState.HEALTHY, **load: int) -> Candidate:
    return Candidate(target, state, Load(**({"max_running": 4, "max_waiting": 4} | load)))


def test_least_loaded_first():
    busy, sent, idle = worker("busy", running=2, waiting=1), worker("sent", running=1, sent=1), worker("idle")
    assert order_workers([busy, sent, idle]) == ["idle", "sent", "busy"]


def test_only_healthy_workers():
    others = [worker(state.value, state) for state in WorkerState if state is not WorkerState.HEALTHY]
    assert order_workers([*others, worker("one", running=9)]) == ["one"]
    assert order_workers(others) == ["failing"]  # rather than none
    assert order_workers([each for each in others if each.state is not WorkerState.FAILING]) == []


def test_full_workers_last_even_if_less_loaded():
    small = worker("small", running=1, max_running=1, max_waiting=0)
    assert order_workers([small, worker("large", running=5)]) == ["large", "small"]


def test_equals_by_free_pages_then_by_order():
    assert order_workers([worker("a", pages_free=1), worker("b", pages_free=2)]) == ["b", "a"]
    assert order_workers([worker("a"), worker("b")]) == ["a", "b"]


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
