"""What the loader takes, what it refuses, and what it says of a model."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvrail.engine.model import fingerprint, probe
from kvrail.engine.model.loader import load_model
from kvrail.engine.model.weights import plain_files
from kvrail.errors import ConfigError, UnsupportedModelError
from kvrail.values.layout import KVLayout
from tests.engine import tiny_models

OPTIONS = {"device": "cpu", "dtype": "auto", "kv_dtype": "bfloat16", "page_size": 16, "load_format": "safetensors"}


def fingerprint_of(folder: Path) -> str:
    return fingerprint.fingerprint_model(folder, plain_files(folder))


@pytest.mark.parametrize("name", tiny_models.REFUSED)
def test_refuses_what_paged_attention_cannot_do(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=tiny_models.REFUSED[name][1]):
        tiny_models.load(name)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_refuses_rotary_embeddings_that_depend_on_the_batch(kind: str, tmp_path: Path) -> None:
    folder = copy(tmp_path, "llama")
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 256}
    edit_config(folder, rope_parameters={**rope, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8})
    with pytest.raises(UnsupportedModelError, match=kind):
        load_model(str(folder), **OPTIONS)


def test_refuses_shared_kv(tmp_path: Path) -> None:
    folder = copy(tmp_path, "llama")
    edit_config(folder, num_kv_shared_layers=1)
    with pytest.raises(UnsupportedModelError, match="shares the KV"):
        load_model(str(folder), **OPTIONS)


def test_refuses_a_window_that_does_not_reach_attention(tmp_path: Path) -> None:
    folder = copy(tmp_path, "llama")
    edit_config(folder, sliding_window=8)
    with pytest.raises(UnsupportedModelError, match="should attend to 8 tokens"):
        load_model(str(folder), **OPTIONS)


def test_refuses_pickled_weights(tmp_path: Path) -> None:
    folder = copy(tmp_path, "llama")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError, match="safetensors"):
        load_model(str(folder), **OPTIONS)


def test_refuses_torn_weights(tmp_path: Path) -> None:
    weights = copy(tmp_path, "llama") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="its header says"):
        load_model(str(weights.parent), **OPTIONS)


def test_refuses_unknown_architectures(tmp_path: Path) -> None:
    folder = copy(tmp_path, "llama")
    edit_config(folder, model_type="of-my-own")
    with pytest.raises(UnsupportedModelError, match="of-my-own"):
        load_model(str(folder), **OPTIONS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu9"}, "tpu9"),
        ({"device": "cuda:77"}, "cuda:77"),
        ({"dtype": "float64"}, "float64"),
        ({"kv_dtype": "int4"}, "int4"),
        ({"page_size": 0}, "page_size is 0"),
        ({"max_model_len": 513}, "513.*512"),
    ],
)
def test_settings_that_do_not_fit(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_models.load("llama", **options)


def test_names_a_missing_folder() -> None:
    with pytest.raises(ConfigError, match="no/such/folder"):
        load_model("/no/such/folder", **OPTIONS)


def test_describes_the_model(tmp_path: Path) -> None:
    folder = copy(tmp_path, "qwen3")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    loaded = load_model(str(folder), **OPTIONS, max_model_len=100)
    assert loaded.layout == KVLayout(3, 2, 24, 24, 16, "bfloat16")
    assert loaded.vocab_size == tiny_models.VOCAB
    assert loaded.max_model_len == 100
    assert loaded.eos_token_ids == {2, 5, 7}
    assert loaded.dtype == torch.float32 and loaded.device == torch.device("cpu")
    assert len(loaded.layers) == 3
    assert not loaded.model.training


def test_keys_and_values_of_different_width() -> None:
    layout = tiny_models.load("deepseek_v3").layout
    assert (layout.key_dim, layout.value_dim, layout.num_kv_heads) == (24, 16, 4)


def test_bfloat16_model_passes_its_probe() -> None:
    assert tiny_models.load("llama", dtype="bfloat16").dtype == torch.bfloat16


def test_dummy_needs_only_a_configuration(tmp_path: Path) -> None:
    shutil.copy(tiny_models.folder_of("llama") / "config.json", tmp_path)
    options = {**OPTIONS, "load_format": "dummy"}
    before = torch.get_rng_state()
    first, second = (load_model(str(tmp_path), **options) for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    assert first.fingerprint == second.fingerprint != tiny_models.load("llama").fingerprint
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_fingerprint_is_of_contents(tmp_path: Path) -> None:
    here = tiny_models.folder_of("llama")
    there = copy(tmp_path, "llama")
    same = fingerprint_of(here)
    edit_config(there, transformers_version="9.9", _name_or_path="elsewhere")
    assert fingerprint_of(there) == same
    edit_config(there, rms_norm_eps=1e-3)
    assert fingerprint_of(there) != same


def test_fingerprint_sees_one_changed_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copy(tmp_path, "llama")
    before = fingerprint_of(folder)
    weights = load_file(folder / "model.safetensors")
    changed = {key: value.clone() for key, value in weights.items()}
    next(iter(changed.values())).view(-1)[0] += 1
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    assert fingerprint_of(folder) != before
    monkeypatch.setattr(fingerprint, "WHOLE_FILE_BYTES", 0)
    sampled = fingerprint_of(folder)
    save_file(
        {key: value * 1.001 for key, value in changed.items()}, folder / "model.safetensors", metadata={"format": "pt"}
    )
    assert fingerprint_of(folder) != sampled


def copy(tmp_path: Path, name: str) -> Path:
    return Path(shutil.copytree(tiny_models.folder_of(name), tmp_path / name))


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("differences", "loads"),
    [((0.19, 0.02), True), ((0.19, math.nan, 0.14), True), ((0.2, 0.19, 1.0), False), ((math.nan,) * 3, False)],
)
def test_a_router_that_tips_over_on_some_prompt_refuses_no_model(differences, loads, monkeypatch) -> None:
    """Experts that are chosen by a hair make bfloat16 differ on some prompts; a real fault is there on all."""
    told = iter(differences)
    monkeypatch.setattr(probe, "_difference", lambda *_: next(told))
    if loads:
        tiny_models.load("qwen3_moe", dtype="bfloat16", kv_dtype="bfloat16")
    else:
        with pytest.raises(UnsupportedModelError, match="other logits paged than dense"):
            tiny_models.load("qwen3_moe", dtype="bfloat16", kv_dtype="bfloat16")
    assert list(told) == []
