"""An engine answers the same, bit for bit, whatever form its pages have."""

import pytest

from kvrail import LLM
from kvrail.config.settings import DEMO_MODEL
from kvrail.engine.kv import closing_cache
from kvrail.errors import ConfigError
from tests.lossless.serving import answers, requests
from tests.models import tiny_model

COUNT = 12
OPTIONS = {"device": "cpu", "max_running": 6, "max_batch_tokens": 256, "max_model_len": 448, "kv_memory_gib": 0.0075}
"""Memory of 15 plain pages."""


def test_lossless_pages_change_no_token() -> None:
    asked = requests(COUNT, 200, 150)
    plain, engine = answers("plain", asked, **OPTIONS)
    lossless, closing = answers("lossless", asked, **OPTIONS)
    assert lossless == plain
    assert engine._scheduler.preemptions > 0 and closing._closer.pages > COUNT


def test_pages_without_spare_units_stay_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no unit is found, what was closed cannot be opened: were it read, tokens would change."""
    known = closing_cache.Outcome.failed.fget
    monkeypatch.setattr(closing_cache.Outcome, "failed", property(lambda self: [1] * len(known(self))))
    asked = requests(4, 200, 70, seed=1)
    plain, _ = answers("plain", asked, **OPTIONS)
    lossless, closing = answers("lossless", asked, **OPTIONS)
    assert lossless == plain and closing._closer.pages == 0


def test_what_cannot_be_closed_is_refused_by_name() -> None:
    for options, what in (
        ({"kv_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"page_size": 48}, "multiples of 64"),
        ({"kv_memory_gib": 0.001}, "no closed page beside 2 open ones"),
    ):
        with pytest.raises(ConfigError, match=what):
            LLM(DEMO_MODEL, kv_cache="lossless", device="cpu", **options)
    with pytest.raises(ConfigError, match="'lossless', but keys of 16 bfloat16"):
        LLM(str(tiny_model("llama")), kv_cache="lossless", device="cpu")
