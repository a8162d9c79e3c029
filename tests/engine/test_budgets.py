"""How many sequences a worker runs at once, by its device, its roles and its pages."""

from types import SimpleNamespace

import pytest
import torch

from kvrail.config.settings import BothSettings, DecodeSettings, PrefillSettings
from kvrail.engine.kv.closing_cache import size_that_fits
from kvrail.values.layout import KVLayout
from kvrail.worker.budgets import LEAST_PLACES, MOST_PLACES, gap_seconds, most_running
from kvrail.worker.kv_cache import pages_for


@pytest.mark.parametrize(
    ("cls", "device", "pages", "places"),
    [
        (DecodeSettings, "cuda", 5_400, MOST_PLACES),  # an 8B model in bfloat16 on a GPU of 80 GiB
        (BothSettings, "cuda:1", 5_400, MOST_PLACES),
        (DecodeSettings, "cuda", 2_100, 128),
        (DecodeSettings, "cuda", 100, LEAST_PLACES),
        (PrefillSettings, "cuda", 5_400, LEAST_PLACES),
        (BothSettings, "cpu", 100_000, LEAST_PLACES),
    ],
)
def test_places_follow_the_pages_of_a_gpu(cls, device, pages, places):
    assert most_running(cls(model="m", device=device), pages) == places


@pytest.mark.parametrize(
    ("form", "places"), [("plain", 64), ("lossless", 64), ("int8", 96), ("int4", 192), ("kvcomp", 192), ("rot3", 256)]
)
def test_places_follow_what_a_form_of_pages_holds(form, places):
    layout = KVLayout(36, 8, 128, 128, 64, "bfloat16")  # an 8B model; 72,768 tokens of plain pages
    loaded = SimpleNamespace(layout=layout, device=torch.device("cuda"), dtype=torch.bfloat16, max_model_len=4096)
    asked = {"model": "m", "device": "cuda", "kv_memory_gib": 10, "kv_cache": form}
    pages, running = pages_for(DecodeSettings(**asked), loaded)
    assert running == places
    if form != "plain":
        assert pages == size_that_fits(layout, "cuda", 10, form, max_running=running, max_model_len=4096)
    assert pages_for(DecodeSettings(**asked, max_running=7), loaded)[1] == 7


def test_what_was_asked_for_counts():
    assert most_running(DecodeSettings(model="m", device="cuda", max_running=7), 5_400) == 7


def test_gap_limits_are_for_gpus_that_decode():
    found = [
        gap_seconds(each)
        for each in (
            BothSettings(model="m", device="cuda"),
            DecodeSettings(model="m", device="cuda:1", slo_gap_ms=20),
            DecodeSettings(model="m", device="cuda", slo_gap_ms=0),
            DecodeSettings(model="m", device="cpu"),
            PrefillSettings(model="m", device="cuda"),
        )
    ]
    assert found == [0.03, 0.02, 0, 0, 0]
