"""Payloads of earlier stages: which of them are kept for whom, and that none is left behind."""

import pytest
from prometheus_client import CollectorRegistry

from codec.base import BlockSpec
from codec.frame import FrameHeader
from kvrail.metrics import TransferMetrics
from services.decode.kept import KeptStages

SPEC = BlockSpec("bfloat16", 1, 2, 16, 2, 8, 8, scaled=False)


@pytest.fixture
def registry():
    return CollectorRegistry()


def kept_bytes(registry):
    return registry.get_sample_value("kvrail_kv_kept_bytes", {"model_name": "m"})


def header(stage, first_page=0, num_stages=3, first_layer=0):
    return FrameHeader("r", "c", stage, num_stages, SPEC, first_layer, first_page, 0)


def add(kept, *args, **options):
    """The payloads given, as bytes; a payload names its stage and place."""
    made = header(*args, **options)
    payload = f"{made.stage} of {made.first_layer}, {made.first_page}".encode()
    return [bytes(each) for each in kept.add(made, memoryview(payload))]


def test_a_stage_is_given_those_before_it_of_the_same_pages(registry):
    with KeptStages(TransferMetrics(registry, "m")) as kept:
        assert add(kept, 0, 0) == [b"0 of 0, 0"]
        assert add(kept, 0, 2) == [b"0 of 0, 2"]
        assert add(kept, 0, 0, first_layer=1) == [b"0 of 1, 0"]
        assert add(kept, 1, 2) == [b"0 of 0, 2", b"1 of 0, 2"]
        assert add(kept, 1, 0) == [b"0 of 0, 0", b"1 of 0, 0"]
        assert kept_bytes(registry) == 5 * 9
        assert add(kept, 2, 0) == [b"0 of 0, 0", b"1 of 0, 0", b"2 of 0, 0"]
        assert kept_bytes(registry) == 3 * 9
        assert add(kept, 2, 2) == [b"0 of 0, 2", b"1 of 0, 2", b"2 of 0, 2"]
        assert kept_bytes(registry) == 9
    assert kept_bytes(registry) == 0


def test_of_one_stage_nothing_is_kept(registry):
    with KeptStages(TransferMetrics(registry, "m")) as kept:
        for page in (0, 2, 4):
            assert add(kept, 0, page, num_stages=1) == [f"0 of 0, {page}".encode()]
        assert kept_bytes(registry) == 0


def test_what_is_kept_goes_with_the_attempt(registry):
    metrics = TransferMetrics(registry, "m")
    with pytest.raises(RuntimeError), KeptStages(metrics) as kept:
        add(kept, 0, 0)
        add(kept, 1, 0)
        add(kept, 0, 2)
        raise RuntimeError
    assert kept_bytes(registry) == 0
    with KeptStages(metrics) as kept:
        assert add(kept, 0, 0) == [b"0 of 0, 0"]
        assert kept_bytes(registry) == 9
    assert kept_bytes(registry) == 0
