"""In which form a worker holds its weights: what the settings may ask for."""

import pytest

from kvrail.config import DecodeSettings, PrefillSettings
from kvrail.errors import ConfigError
from kvrail.services.weights import forms_of


@pytest.mark.parametrize("settings", [DecodeSettings, PrefillSettings])
def test_weights_stay_plain_unless_asked_for(settings):
    assert forms_of(settings(device="cpu")).hold is None


def test_packed_weights_on_a_cpu_are_refused_by_name():
    with pytest.raises(ConfigError, match="weights is 'packed', but packed weights need an NVIDIA GPU, not device cpu"):
        forms_of(DecodeSettings(device="cpu", weights="packed"))


def test_packed_weights_in_float32_are_refused_by_name():
    with pytest.raises(ConfigError, match="dtype is 'float32'; only bfloat16 can be packed"):
        forms_of(DecodeSettings(device="cuda", dtype="float32", weights="packed"))
