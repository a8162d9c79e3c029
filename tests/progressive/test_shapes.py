"""Models of random weights in benchmarks: what they weigh, and whether a GPU holds them."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.link import devices
from benchmarks.shapes import SHAPES, weight_bytes, write_shape

H200 = SimpleNamespace(total_memory=150_000_000_000)


@pytest.fixture
def gpus(monkeypatch):
    """Has torch see so many GPUs."""

    def see(count):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: H200)

    return see


@pytest.mark.parametrize("name", SHAPES)
def test_weights_are_as_heavy_as_transformers_makes_them(name, tmp_path):
    config = AutoConfig.from_pretrained(write_shape(name, tmp_path))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    matrices = [each for each in model.parameters() if each.dim() > 1]
    assert weight_bytes(name) == 2 * sum(each.numel() for each in matrices)


def test_each_worker_has_a_gpu_where_there_are_two(gpus):
    gpus(2)
    assert devices("cuda", "qwen3-32b") == (["--device", "cuda:0"], ["--device", "cuda:1"])


def test_two_models_too_large_for_one_gpu_are_refused(gpus):
    gpus(1)
    assert devices("cuda", "qwen3-8b")[0][:2] == ["--device", "cuda:0"]
    with pytest.raises(SystemExit, match=r"qwen3-32b has 66 GB of weights, too many twice on a GPU of 150 GB"):
        devices("cuda", "qwen3-32b")
