"""`--kv-cache auto:BOUND`: the form that figures of `kvrail quality` allow, for all that starts workers."""

import json

import pytest

from kvrail import LLM, SamplingParams
from kvrail.cli.main import main
from kvrail.config.kv_quality import form_under
from kvrail.config.settings import DecodeSettings, PrefillSettings
from kvrail.errors import ConfigError
from kvrail.offline.settings import LLMSettings
from tests.cli.test_plan import plan, settings_of
from tests.models import tiny_model


@pytest.fixture
def figures(tmp_path):
    """Writes figures, (name, bits, KL) a row; gives the file's path."""

    def write(*rows, **more):
        path = tmp_path / "quality.json"
        named = [{"name": name, "bits": bits, "kl": kl} for name, bits, kl in rows]
        path.write_text(json.dumps({"model_fingerprint": "f", "figures": named, **more}), encoding="utf-8")
        return str(path)

    return write


USUAL = (("int8 pages", 8.5, 2e-5), ("int4 pages", 4.5, 0.0036), ("int4", 4.1, 1e-9), ("plain pages", 16.0, 0.0))


@pytest.mark.parametrize(
    ("bound", "form"), [("0.0036", "int4"), ("1", "int4"), ("0.0035", "int8"), ("2e-5", "int8"), ("1e-5", "lossless")]
)
def test_the_fewest_bits_whose_kl_is_within_the_bound(figures, bound, form):
    path = figures(*USUAL)
    assert form_under(f"auto:{bound}", path) == form
    assert DecodeSettings.load({"kv_cache": f"auto:{bound}", "kv_quality": path}).kv_cache == form
    assert form_under("auto:0.5", figures(("int8 pages", 8.5, 0.4), ("int4 pages", 4.5, 0.6))) == "int8"
    assert form_under("auto:0.5", figures(("int8 pages", 8.5, 0.1), ("int4 pages", 4.5, 0.2))) == "int4"


@pytest.mark.parametrize("bound", ["", "x", "0", "-1", "nan", "inf", "0.1,0.2"])
def test_a_bound_is_a_positive_number(figures, bound):
    with pytest.raises(ConfigError, match=r"--kv-cache: 'auto:.*' is not accepted: write auto:BOUND"):
        DecodeSettings.load({"kv_cache": f"auto:{bound}", "kv_quality": figures(*USUAL)})


def test_figures_that_cannot_be_read_are_named(figures, tmp_path):
    def refused(path):
        with pytest.raises(ConfigError) as found:
            DecodeSettings.load({"kv_cache": "auto:0.1", "kv_quality": path})
        told = str(found.value)
        assert told.count("kv_quality") <= 2 and "ValueError('kv_quality" not in told  # each fault is told once
        return told

    assert "set kv_quality too" in refused("")
    assert "nowhere.json: No such file or directory" in refused(str(tmp_path / "nowhere.json"))
    (tmp_path / "text").write_text("loss 0.1")
    assert "is not JSON" in refused(str(tmp_path / "text"))
    (tmp_path / "text").write_text("[1]")
    assert "has no figures" in refused(str(tmp_path / "text"))
    assert "has no figures" in refused(figures(("int4 pages", "few", 0.1)))
    assert "has no figures" in refused(figures(figures=[{"name": "int4 pages"}]))
    assert "no figures of lossy pages" in refused(figures(("int4", 4.1, 0.1), ("plain pages", 16.0, 0.0)))


def test_workers_that_prefill_alone_keep_exact_pages(figures, tmp_path):
    path = figures(*USUAL)
    with pytest.raises(ConfigError, match="int4 loses bits"):
        PrefillSettings.load({"kv_cache": "auto:0.1", "kv_quality": path})
    flags = ("--kv-cache", "auto:0.1", "--kv-quality", path, "--decode-workers", "1")
    _, *given = map(settings_of, plan(*flags, model=str(tiny_model("llama"))).processes)
    assert [worker.kv_cache for worker in given] == ["plain", "int4"]


def test_what_quality_measured_chooses_the_form_of_that_model_alone(tmp_path, capsys):
    text, path, model = tmp_path / "text.txt", tmp_path / "quality.json", str(tiny_model("llama", head_dim=64))
    text.write_text("A form of pages is chosen by what it costs. " * 40, encoding="utf-8")
    sizes = ("--context-tokens", "128", "--next-tokens", "8", "--contexts", "2")
    asked = ("--text", str(text), "--kv-cache", "int8,int4,kvcomp,rot3", "--json", str(path))
    assert main(["quality", "--model", model, *asked, *sizes]) == 0
    capsys.readouterr()
    kl = {row["name"]: row["kl"] for row in json.loads(path.read_text())["figures"]}
    assert 0 < kl["int8 pages"] < kl["int4 pages"] < kl["kvcomp pages"] < kl["rot3 pages"]
    options = {"kv_quality": str(path), "device": "cpu", "kv_dtype": "bfloat16", "max_model_len": 256}
    options["kv_memory_gib"] = 0.02
    for form in ("int8", "int4", "kvcomp", "rot3"):
        bound = f"auto:{kl[f'{form} pages']}"
        assert LLMSettings.of(model, {"kv_cache": bound, **options}).kv_cache == form
        with LLM(model, kv_cache=bound, **options) as llm:
            assert len(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))[0].outputs[0].token_ids) == 2
    other = str(tiny_model("qwen3", head_dim=64))
    with pytest.raises(ConfigError, match=f"quality.json is of another model than {other}"):
        LLM(other, kv_cache="auto:1", **options)
