"""An engine answers the same, bit for bit, whatever form its pages have."""

from typing import Any

import pytest

from kvrail import LLM
from kvrail.config.settings import DEMO_MODEL
from kvrail.engine.kv import closing_cache
from kvrail.errors import ConfigError
from tests.lossless.serving import answers, requests
from tests.models import kv_gib, tiny_model

COUNT = 8
OPTIONS = {"device": "cpu", "max_running": 6, "max_batch_tokens": 256, "max_model_len": 448}


def both(count: int, most: int, seed: int, pages: int) -> tuple[list, Any, list, Any]:
    """Answers of a small model over plain and over closed pages, in the memory of `pages` plain ones, and engines."""
    folder = tiny_model("llama", head_dim=64, num_hidden_layers=2)
    prompts, params = requests(count, 200, most, seed)
    asked = [[token % 256 for token in prompt] for prompt in prompts], params
    options = OPTIONS | {"kv_memory_gib": kv_gib(folder, pages)}
    return *answers("plain", asked, str(folder), **options), *answers("lossless", asked, str(folder), **options)


def test_lossless_pages_change_no_token() -> None:
    plain, engine, lossless, closing = both(COUNT, 80, 0, 12)
    assert lossless == plain
    assert engine._scheduler.preemptions > 0 and closing._closer.pages > COUNT


def test_pages_without_spare_units_stay_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no unit is found, what was closed cannot be opened: were it read, tokens would change."""
    known = closing_cache.Outcome.failed.fget
    monkeypatch.setattr(closing_cache.Outcome, "failed", property(lambda self: [1] * len(known(self))))
    plain, _, lossless, closing = both(4, 70, 1, 12)
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
