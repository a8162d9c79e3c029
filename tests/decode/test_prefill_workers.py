"""Which prefill workers a request may name, and which are asked."""

import pytest

from kvrail.breaker import FAILURES
from kvrail.services.decode.prefill_workers import AllowedWorkers, Asked, Breakers

NAMED = [
    "10.1.2.3:7001",
    "10.200.0.1:7001",
    "prefill:7001",
    "prefill:9999",
    "[fd00::1]:7001",
    "evil:7001",
    "127.0.0.1:1",
]


@pytest.mark.parametrize(
    ("rules", "allowed"),
    [
        ((), NAMED),
        (("prefill",), ["prefill:7001", "prefill:9999"]),
        (("prefill:7001",), ["prefill:7001"]),
        (("10.1.0.0/16", "fd00::/8"), ["10.1.2.3:7001", "[fd00::1]:7001"]),
        (("127.0.0.1",), ["127.0.0.1:1"]),
    ],
)
def test_only_what_a_rule_names_may_be_asked(rules, allowed):
    assert AllowedWorkers(rules).of(NAMED) == allowed


def test_failures_are_those_of_one_start_of_a_worker():
    breakers, first, anew = Breakers(), Asked("p:1", 5), Asked("p:1", 6)
    for _ in range(FAILURES):
        breakers.of(first).failed(breakers.of(first).begin())
    assert not breakers.of(first).allows
    assert breakers.of(Asked("p:2", 5)).allows
    assert breakers.of(anew).allows
    assert breakers.of(first).allows  # nothing is kept of what was there before
