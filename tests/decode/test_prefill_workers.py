"""Which prefill workers a request may name."""

import pytest

from services.decode.prefill_workers import AllowedWorkers

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
