"""What a decode worker says of the bits of a request's tokens."""

import logging

from kvrail.services.decode.invariance import InvarianceTracker


def test_a_request_has_the_numerics_of_all_who_computed_it():
    invariance = InvarianceTracker("aa")
    assert invariance.of(None, 0) == "aa"
    invariance.received("p:1", "aa")
    assert invariance.of("aa", 64) == "aa"
    assert invariance.of("", 0) == invariance.of("bb", 0) == ""


def test_kv_of_other_bits_stays_in_the_prefix_cache():
    invariance = InvarianceTracker("aa")
    invariance.received("p:1", "bb")
    assert invariance.of(None, 0) == invariance.of("aa", 0) == "aa"
    assert invariance.of(None, 64) == invariance.of("aa", 64) == ""


def test_a_prefill_worker_of_other_bits_is_told_of_once(caplog):
    invariance = InvarianceTracker("aa")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            invariance.received("p:1", "bb")
    assert [record.message for record in caplog.records] == [
        "prefill worker p:1 computes other bits (numerics bb, here aa), so that tokens may differ with where a prompt"
        " is computed; run the same GPUs, versions and settings on both"
    ]


def test_who_promises_nothing_has_nothing_to_tell(caplog):
    invariance = InvarianceTracker("")
    invariance.received("p:1", "bb")
    assert invariance.of(None, 0) == invariance.of("bb", 0) == "" and not caplog.records
