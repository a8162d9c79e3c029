"""The trial at a worker's start finds that output is batch-invariant, or names what is not."""

import pytest
import torch

from kvrail.config.settings import DecodeSettings
from kvrail.engine.model.onednn_linear import OneDnnLinear
from kvrail.engine.step.invariance import Finding
from kvrail.engine.step.runner import ModelRunner
from kvrail.errors import ConfigError
from kvrail.worker.process import _tell_of
from tests.engine import tiny_models


def found(name: str, **options: object) -> Finding:
    runner = ModelRunner(tiny_models.load(name), 32, max_running=8, max_batch_tokens=128, **options)
    runner.warm_up()
    return runner.finding


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_dense_models_hold_and_every_start_finds_the_same(name: str) -> None:
    first = found(name)
    assert first.holds and first.reason == ""
    assert found(name) == first


def test_other_models_have_other_numerics() -> None:
    assert len({found(name).numerics for name in ("llama", "mistral", "qwen3")}) == 3


def test_mixtures_of_experts_are_named() -> None:
    finding = found("qwen3_moe")
    assert not finding.holds
    assert "experts' products have as many rows as tokens chose them" in finding.reason


def test_products_that_depend_on_their_rows_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    original = OneDnnLinear.forward

    def by_rows(self: OneDnnLinear, x: torch.Tensor) -> torch.Tensor:
        """Products of a library that takes another kernel for many rows."""
        return original(self, x) * (1 + 2**-22 * (self.in_features == 96 and x.shape[-2] > 40))

    monkeypatch.setattr(OneDnnLinear, "forward", by_rows)
    finding = found("llama")
    assert not finding.holds
    assert finding.reason.endswith(
        "depends on what is computed beside it; products of these shapes do (in x out): 96 x 64"
    )


def test_a_pool_too_small_to_try_it_promises_nothing() -> None:
    runner = ModelRunner(tiny_models.load("llama"), 2, max_running=8, max_batch_tokens=128)
    runner.warm_up()
    assert not runner.finding.holds and "too few for a trial" in runner.finding.reason


def test_whoever_does_not_ask_gets_no_promise() -> None:
    finding = found("llama", invariant=False)
    assert finding == Finding("", "not asked for")


def test_a_worker_told_to_keep_the_promise_refuses_to_start_without() -> None:
    broken = Finding("", "products of these shapes do (in x out): 64 x 96")
    with pytest.raises(ConfigError, match=r"invariant is 'on', but products .* 64 x 96; set it to auto"):
        _tell_of(broken, DecodeSettings(invariant="on"))
    for settings in (DecodeSettings(), DecodeSettings(invariant="off")):
        _tell_of(broken, settings)
    _tell_of(Finding("12ab", ""), DecodeSettings(invariant="on"))
