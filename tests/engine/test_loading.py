"""What is told while weights are loaded."""

import pytest
from safetensors.torch import load_file

from kvrail.engine.loader import load_model
from kvrail.engine.loading import tensor_bytes
from tests.engine.test_loader import OPTIONS
from tests.models import tiny_model


def test_tells_how_many_bytes_of_the_weights_are_loaded(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.setattr("kvrail.engine.loading.TELL_S", -1.0)
    caplog.set_level("INFO", "kvrail.worker")
    folder = tiny_model("llama")
    total = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert sum(tensor_bytes(folder).values()) == total
    monkeypatch.setattr("kvrail.engine.loading.GB", 1.0)
    load_model(str(folder), **OPTIONS)
    lines = [record.getMessage() for record in caplog.records if "loading weights" in record.getMessage()]
    assert lines[0].startswith(f"loading weights: {total:.2f} GB in ")
    done = [float(line.split()[2]) for line in lines[1:]]
    assert len(done) > 10
    assert done == sorted(done)
    assert done[-1] == total
