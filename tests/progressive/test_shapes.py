"""Models of random weights in benchmarks: what they weigh, and whether a GPU holds them."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.link import devices
from benchmarks.shapes import SHAPES, weight_bytes, write_shape

H200, H100 = (SimpleNamespace(total_memory=gb * 10**9) for gb in (150, 85))


@pytest.fixture
def gpus(monkeypatch):
    """Has torch see so many GPUs."""

    def see(count, gpu=H200):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)

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


def test_two_workers_share_what_one_gpu_has_beside_the_weights(gpus):
    gpus(1)
    assert devices("cuda", "qwen3-8b")[0] == ["--device", "cuda:0", "--kv-memory-gib", "40"]
    assert devices("cuda", "qwen3-32b")[1] == ["--device", "cuda:0", "--kv-memory-gib", "3.24"]


def test_two_models_too_large_for_one_gpu_are_refused(gpus):
    gpus(1, H100)
    assert devices("cuda", "qwen3-8b")[0] == ["--device", "cuda:0", "--kv-memory-gib", "18.7"]
    with pytest.raises(SystemExit, match=r"qwen3-32b has 66 GB of weights, too many twice on a GPU of 85 GB"):
        devices("cuda", "qwen3-32b")
