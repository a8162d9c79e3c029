"""`kvrail calibrate` on tiny models, and its histograms against transformers' own KV cache."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from kvrail.cli.calibrate import DTYPES
from kvrail.cli.main import main
from kvrail.codec.splitzip.one_stage.codebook import WINDOWS, Codebook, default_codebook
from kvrail.codec.splitzip.one_stage.exponents import coverage, histogram
from kvrail.codec.splitzip.tiles.format import FORMATS
from kvrail.config.settings import DEMO_MODEL, DecodeSettings
from kvrail.engine.model.loader import load_model
from kvrail.text import load_tokenizer
from kvrail.tools.calibrate import measure as measuring
from kvrail.tools.calibrate.main import describe, make_codebook
from kvrail.tools.calibrate.report import report
from kvrail.wire.v1 import common_pb2
from kvrail.worker.monitor import Monitor
from kvrail.worker.process import build_worker
from tests.models import VOCAB, reference_model, tiny_model

LAYERS, VALUES = 3, 2 * 16  # of the tiny models; values of a token in a layer's keys


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("A window covers a run of exponents; what lies outside is repaired. " * 40, encoding="utf-8")
    return path


@pytest.fixture
def calibrate(capsys, text, tmp_path):
    """Runs the command on a tiny model; `flags` come after those that a run needs."""

    def run(*flags):
        given = ["--model", str(tiny_model("llama")), "--text", str(text), "--out", str(tmp_path / "codebook.json")]
        try:
            status = main(["calibrate", *given, *flags])
        except SystemExit as ended:
            status = ended.code
        out, error = capsys.readouterr()
        told = error.splitlines(keepends=True)
        assert status or told[:1] == ["loading PyTorch and transformers\n"]
        return status, out, "".join(line for line in told if line.startswith("kvrail calibrate: "))

    return run


def load(folder, dtype="bfloat16", **options):
    return load_model(
        str(folder), device="cpu", dtype="auto", kv_dtype=dtype, page_size=64, load_format="safetensors", **options
    )


def token_ids(count, seed=0):
    return torch.randint(0, VOCAB - 8, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_histograms_are_those_of_transformers_own_cache(family):
    folder, ids = tiny_model(family), token_ids(300)
    measured = measuring.measure(load(folder), [ids])
    with torch.inference_mode():
        cache = reference_model(str(folder))(torch.tensor([ids]), use_cache=True).past_key_values
    for kind, found in (("keys", measured.keys), ("values", measured.values)):
        for layer in range(LAYERS):
            own = getattr(cache.layers[layer], kind).to(torch.bfloat16).view(torch.uint16).numpy()
            expected = histogram(own, FORMATS["bfloat16"])
            assert expected.sum() == found[layer].sum() == 300 * VALUES
            # Behind the first layer, rounding: paged attention reads what bfloat16 keeps, transformers' float32.
            assert np.abs(expected - found[layer]).sum() <= (1e-2 * expected.sum() if layer else 0)
            assert np.abs(expected - found[layer - 1]).sum() > 1e-2 * expected.sum()


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_token_of_each_text_counts_once(monkeypatch, dtype):
    monkeypatch.setattr(measuring, "SEQUENCE_TOKENS", 150)
    loaded = load(tiny_model("llama"), dtype)
    long, short = token_ids(230), token_ids(65, seed=1)
    together = measuring.measure(loaded, [long, short])
    parts = [long[:150], long[150:], short]
    apart = [measuring.measure(loaded, [part]) for part in parts]
    assert together.tokens == sum(map(len, parts))
    for name in ("keys", "values"):
        counts = getattr(together, name)
        assert counts.shape == (LAYERS, FORMATS[dtype].exponents)
        assert counts.sum(axis=1).tolist() == [together.tokens * VALUES] * LAYERS
        assert (counts == sum(getattr(one, name) for one in apart)).all()


def test_a_model_with_a_short_context_is_measured_in_short_sequences():
    loaded, ids = load(tiny_model("llama"), max_model_len=100), token_ids(250)
    cut = measuring.measure(loaded, [ids])
    assert (cut.keys == measuring.measure(loaded, [ids[:100], ids[100:200], ids[200:]]).keys).all()


@pytest.mark.parametrize(
    ("dtype", "flag"), [("bfloat16", "--shared"), *zip(DTYPES, ("--per-layer", "--shared") * 2, strict=True)]
)
def test_the_codebook_covers_at_least_what_the_default_covers(calibrate, text, tmp_path, dtype, flag):
    status, out, error = calibrate(flag, "--kv-dtype", dtype)
    assert (status, error) == (0, "")
    codebook = Codebook.load(tmp_path / "codebook.json")
    windows = codebook.dtypes[dtype]
    folder = tiny_model("llama")
    ids = load_tokenizer(str(folder)).encode(text.read_text(), add_special_tokens=True)
    measured = measuring.measure(load(folder, dtype), [ids])
    assert windows.tokens == len(ids)
    for kind, tensor, counts in (("keys", windows.keys, measured.keys), ("values", windows.values, measured.values)):
        own, default = (each.tops(dtype, kind, range(LAYERS)) for each in (codebook, default_codebook()))
        covered = [coverage(counts[layer], own[layer], WINDOWS[dtype]) for layer in range(LAYERS)]
        assert tensor.coverage == pytest.approx(covered, abs=1e-6)
        shipped = [coverage(counts[layer], default[layer], WINDOWS[dtype]) for layer in range(LAYERS)]
        if flag == "--shared":
            assert len(tensor.tops) == 1
            assert np.mean(covered) >= np.mean(shipped)
        else:
            assert len(tensor.tops) == LAYERS
            assert all(a >= b for a, b in zip(covered, shipped, strict=True))
        assert all(a <= b for a, b in zip(tensor.coverage, tensor.best_set_coverage, strict=True))
        for layer in range(LAYERS):
            assert f"  {own[layer]:>5}  {tensor.coverage[layer]:>9.3%}" in out.splitlines()[3 + layer]
    assert f"codebook {codebook.id:016x} of model {codebook.model_fingerprint[:12]}" in out.splitlines()[-1]


async def test_the_fingerprint_is_what_a_worker_reports(calibrate, tmp_path):
    assert calibrate()[0] == 0
    settings = DecodeSettings(model=str(tiny_model("llama")), kv_memory_gib=0.01)
    worker = build_worker(settings, Monitor(settings))
    assert (
        Codebook.load(tmp_path / "codebook.json").model_fingerprint
        == worker.reporter({"raw": 0}, []).report(common_pb2.StatusRequest()).model.fingerprint
    )
    other = Codebook.load(tmp_path / "codebook.json").model_fingerprint
    assert other != load(tiny_model("llama", seed=1)).fingerprint


def test_an_existing_file_is_kept_unless_forced(calibrate, tmp_path):
    codebook = tmp_path / "codebook.json"
    codebook.write_text("mine")
    status, out, error = calibrate()
    assert (status, out) == (2, "")
    assert error.startswith(f"kvrail calibrate: --out {codebook} exists already; add --force to overwrite it")
    assert codebook.read_text() == "mine"
    assert calibrate("--force")[0] == 0
    assert Codebook.load(codebook).num_layers == LAYERS


def test_tokens_are_shared_out_among_texts(calibrate, text, tmp_path):
    second = tmp_path / "second.txt"
    second.write_text("words " * 2000)
    assert calibrate("--text", str(second), "--tokens", "1500")[0] == 0
    codebook = Codebook.load(tmp_path / "codebook.json")
    assert codebook.dtypes["bfloat16"].tokens == 1500
    assert codebook.comment == "text: text.txt, second.txt"


def test_badly_covered_layers_are_named():
    counts = np.zeros((4, 256), np.int64)
    counts[:, 130] = [1000, 990, 989, 0]
    counts[:, 60] = 1000 - counts[:, 130]
    good = np.zeros_like(counts)
    good[:, 130] = 1000
    measured = measuring.Measurement(keys=counts, values=good, tokens=1024)
    codebook = make_codebook(measured, model="m", fingerprint="", dtype="bfloat16", shared=True, comment="")
    lines = [line for line in report(codebook, "bfloat16", Path("codebook.json")).splitlines() if "warning" in line]
    assert lines == [
        "warning: the window covers less than 99% of the keys of layers 2, 3; worst is layer 3 with 0.000%"
    ]


@pytest.mark.parametrize(
    ("flags", "status", "expected"),
    [
        (["--text", "/nowhere.txt"], 2, "--text /nowhere.txt: No such file or directory; name a readable text file"),
        (["--tokens", "1023"], 2, "--tokens is 1023; ask for at least 1024"),
        (["--tokens", "x"], 2, "argument --tokens: invalid int value: 'x'"),
        (["--kv-dtype", "int3"], 2, "argument --kv-dtype: invalid choice: 'int3'"),
        (["--kv-dtype", "float32"], 2, "argument --kv-dtype: invalid choice: 'float32'"),
        (["--device", "tpu"], 2, "device is 'tpu'; choose cpu, cuda or cuda:N"),
        (["--model", "./nowhere"], 2, "--model: there is no folder ./nowhere; name a folder"),
        (
            ["--out", "/nowhere/codebook.json"],
            2,
            "--out /nowhere/codebook.json is no file in a folder that exists; name one",
        ),
        (["--out", "/"], 2, "--out / is no file in a folder that exists; name one"),
        (["--shared", "--per-layer"], 2, "argument --per-layer: not allowed with argument --shared"),
        (["--tokns", "9"], 2, "unknown argument --tokns; did you mean --tokens?"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(calibrate, tmp_path, flags, status, expected):
    found, out, error = calibrate(*flags)
    assert (found, out, error.count("\n")) == (status, "", 1)
    assert error.startswith(f"kvrail calibrate: {expected}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that even root cannot write to")
def test_a_file_that_cannot_be_written_is_told_before_torch_is_imported(calibrate, monkeypatch):
    monkeypatch.setattr("importlib.import_module", lambda name: pytest.fail(f"{name} was imported"))
    status, _, error = calibrate("--out", "/proc/codebook.json")
    assert (status, error.count("\n")) == (2, 1)
    assert error.startswith("kvrail calibrate: --out /proc/codebook.json: ")


@pytest.mark.parametrize("missing", ["--text", "--out"])
def test_what_must_be_given(capsys, tmp_path, missing):
    given = {"--text": "a.txt", "--out": str(tmp_path / "b.json")}
    del given[missing]
    with pytest.raises(SystemExit) as ended:
        main(["calibrate", *(part for pair in given.items() for part in pair)])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"kvrail calibrate: the following arguments are required: {missing}\n"


def test_texts_that_tell_too_little(calibrate, capsys, tmp_path):
    few, binary = tmp_path / "few.txt", tmp_path / "binary"
    few.write_text("few words")
    binary.write_bytes(b"\xff\xfe\x80")
    out = tmp_path / "few.json"
    for path, expected in ((few, "--text: the files give "), (binary, f"--text {binary} is not UTF-8")):
        assert main(["calibrate", "--model", str(tiny_model("llama")), "--text", str(path), "--out", str(out)]) == 2
        assert f"\nkvrail calibrate: {expected}" in capsys.readouterr().err
    assert not out.exists()


def test_weights_that_are_torn_and_models_that_cannot_run(calibrate, tmp_path):
    torn = tmp_path / "torn"
    shutil.copytree(tiny_model("llama"), torn)
    weights = torn / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    status, _, error = calibrate("--model", str(torn))
    assert (status, error.count("\n")) == (2, 1)
    assert error.startswith(f"kvrail calibrate: {weights} has ") and error.endswith("fetch it again\n")
    config = json.loads((torn / "config.json").read_text())
    (torn / "config.json").write_text(json.dumps(config | {"model_type": "nothing"}))
    status, _, error = calibrate("--model", str(torn))
    assert status == 1
    assert error.startswith("kvrail calibrate: transformers does not know the configuration")
    assert not (tmp_path / "codebook.json").exists()


def test_the_help_names_every_type_and_the_defaults(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert set(DTYPES) == set(WINDOWS)
    with pytest.raises(SystemExit) as ended:
        main(["calibrate", "--help"])
    out = capsys.readouterr().out
    assert ended.value.code == 0
    assert " | ".join(DTYPES) in out
    assert all(flag in out for flag in ("--model", "--text", "--tokens", "--out", "--force", "--per-layer", "--shared"))


@pytest.mark.parametrize(
    "dtype", ["bfloat16", *(pytest.param(dtype, marks=pytest.mark.heavy) for dtype in DTYPES if dtype != "bfloat16")]
)
def test_the_figures_of_the_default_codebook_are_those_of_the_demo_model(dtype):
    ids = load_tokenizer(DEMO_MODEL).encode((Path(DEMO_MODEL) / "heldout.txt").read_text(), add_special_tokens=True)
    measured = measuring.measure(load(DEMO_MODEL, dtype), [ids])
    windows = default_codebook().dtypes[dtype]
    assert windows.tokens == measured.tokens
    for shipped, counts in ((windows.keys, measured.keys), (windows.values, measured.values)):
        found = describe(counts, shipped.tops, WINDOWS[dtype])
        for name, numbers in shipped:
            assert numbers == pytest.approx(getattr(found, name), abs=2e-3), name
