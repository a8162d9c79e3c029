"""`kvrail quality` on tiny models, and its figures against transformers over a cache that went through the codec."""

import json
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from kvrail.cli.main import main
from kvrail.cli.quality import DTYPES
from kvrail.codec import registry
from kvrail.codec.base import Block, PagedBlock
from kvrail.config.settings import DEMO_MODEL
from kvrail.engine.model.loader import load_model
from kvrail.text.samples import read_samples
from kvrail.tools.quality.lossy import AtRest, OnTheWire
from kvrail.tools.quality.measure import Figures, Measurement, measure
from kvrail.tools.quality.options import PAGE_FORMS
from kvrail.tools.quality.report import report, warnings
from kvrail.values.layout import KVLayout
from tests.models import VOCAB, reference_model, tiny_model

CONTEXT, NEXT = 128, 24
SMALL = ("--context-tokens", "64", "--next-tokens", "8", "--contexts", "3")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("What a lossy codec costs depends on the model and on the text. " * 40, encoding="utf-8")
    return path


@pytest.fixture
def quality(capsys, text):
    """Runs the command on a tiny model; `flags` come after those that a run needs."""

    def run(*flags):
        try:
            status = main(["quality", "--model", str(tiny_model("llama")), "--text", str(text), *SMALL, *flags])
        except SystemExit as ended:
            status = ended.code
        out, error = capsys.readouterr()
        told = error.splitlines(keepends=True)
        return status, out, "".join(line for line in told if line.startswith("kvrail quality: "))

    return run


def load(folder, dtype="float32"):
    return load_model(str(folder), device="cpu", dtype="auto", kv_dtype=dtype, page_size=64, load_format="safetensors")


def windows(count):
    ids = torch.randint(0, VOCAB - 8, (count, CONTEXT + NEXT + 1), generator=torch.Generator().manual_seed(1))
    return ids.tolist()


@torch.inference_mode()
def transformers_own(folder, window, codec):
    """Log-probabilities of the tokens after the context: over transformers' exact cache, and as the codec leaves it."""
    model = reference_model(str(folder))
    context, rest = torch.tensor([window[:CONTEXT]]), torch.tensor([window[CONTEXT:-1]])
    found = []
    for coarse in (False, True):
        cache = DynamicCache(config=model.config)
        model(context, past_key_values=cache, use_cache=True)
        if coarse:
            # [layers, pages, page_size, heads, dim] from [1, heads, tokens, dim] each
            keys, values = (
                torch.stack([getattr(layer, kind)[0].transpose(0, 1).unflatten(0, (-1, 64)) for layer in cache.layers])
                for kind in ("keys", "values")
            )
            pages = PagedBlock.whole(Block(keys.contiguous(), values.contiguous()))
            codec.decode(0, codec.encode(pages).stages(), pages)
            for layer, key, value in zip(cache.layers, *pages.pools.tensors(), strict=True):
                layer.keys, layer.values = (each.flatten(0, 1).transpose(0, 1)[None] for each in (key, value))
        found.append(model(rest, past_key_values=cache, use_cache=True).logits[0].log_softmax(-1))
    return found


@pytest.mark.parametrize("name", ["int4", "kvcomp-block"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_figures_are_those_of_transformers_over_a_cache_that_went_through_the_codec(family, name):
    folder, given, codec = tiny_model(family), windows(2), registry.get(name)
    measured = measure(load(folder), given, CONTEXT, [OnTheWire(codec)])
    (found,) = measured.figures
    losses, kls, agreed = [[], []], [], []
    for window in given:
        exact, coarse = transformers_own(folder, window, codec)
        truth = torch.tensor(window[CONTEXT + 1 :])[:, None]
        for each, predictions in zip(losses, (exact, coarse), strict=True):
            each.append(-predictions.gather(-1, truth).mean().item())
        kls.append((exact.exp() * (exact - coarse)).sum(-1).mean().item())
        agreed.append((exact.argmax(-1) == coarse.argmax(-1)).float().mean().item())
    assert measured.loss == pytest.approx(sum(losses[0]) / 2, abs=1e-4)
    # A value may fall on the other side of the middle between two steps, since its last bits differ.
    assert found.loss == pytest.approx(sum(losses[1]) / 2, abs=1e-3)
    assert found.kl == pytest.approx(sum(kls) / 2, rel=0.1) and found.kl > 1e-7
    assert found.top1 == pytest.approx(sum(agreed) / 2, abs=2 / (2 * NEXT))
    assert found.loss != measured.loss


@pytest.mark.parametrize("name", ["raw", "splitzip-channel", "lynx-exact"])
def test_an_exact_codec_costs_nothing(name):
    measured = measure(load(tiny_model("llama"), "bfloat16"), windows(2), CONTEXT, [OnTheWire(registry.get(name))])
    (found,) = measured.figures
    assert (found.loss, found.error, found.top1, found.kl) == (measured.loss, 0.0, 1.0, 0.0)
    assert found.bits < 17


def test_codecs_do_not_meet_what_others_left():
    loaded, given = load(tiny_model("llama"), "bfloat16"), windows(2)
    names = ("int4", "int8", "raw")
    together = measure(loaded, given, CONTEXT, [OnTheWire(registry.get(name)) for name in names]).figures
    apart = [measure(loaded, given, CONTEXT, [OnTheWire(registry.get(name))]).figures[0] for name in names]
    assert list(together) == apart
    assert together[0].kl > together[1].kl > together[2].kl == 0


def test_all_lossy_codecs_by_default_with_table_and_json(quality, tmp_path):
    path = tmp_path / "quality.json"
    status, out, error = quality("--json", str(path))
    assert (status, error) == (0, "")
    found = json.loads(path.read_text())
    lossy = [name for name in registry.names() if not registry.get(name).exact]
    assert [each["name"] for each in found["figures"]] == lossy
    assert (found["contexts"], found["context_tokens"], found["next_tokens"]) == (3, 64, 8)
    assert (found["kv_dtype"], found["texts"], len(found["key_spreads"])) == ("bfloat16", ["text.txt"], 3)
    lines = {line.split()[0]: line for line in out.splitlines() if line}
    for each in found["figures"]:
        assert f" {each['bits']:.2f} " in lines[each["name"]] and f"{each['kl']:.5f}" in lines[each["name"]]
    assert quality("--json", str(path))[0] == 2 and quality("--json", str(path), "--force")[0] == 0


@pytest.fixture(scope="module")
def demo():
    """The demo model in bfloat16, and two contexts of 128 tokens of its held-out text."""
    held_out = Path(DEMO_MODEL) / "heldout.txt"
    (tokens,) = read_samples(str(DEMO_MODEL), [held_out], 400)
    return load(DEMO_MODEL, "bfloat16"), [tokens[at : at + 128 + 64 + 1] for at in (0, 193)]


def forms(loaded):
    return [AtRest(name, loaded.layout) for name in PAGE_FORMS]


def test_lossy_pages_cost_the_demo_model_little(demo):
    loaded, given = demo
    plain, eight, four, coded, rotated = measure(loaded, given, 128, forms(loaded)).figures
    assert (plain.name, plain.bits, plain.kl, plain.top1) == ("plain pages", 16.0, 0.0, 1.0)
    assert eight.bits == 8.5 and eight.top1 >= 0.98 and 0 < eight.kl < 1e-4
    assert four.bits == 4.5 and four.top1 >= 0.95 and eight.kl < four.kl < 5e-3
    assert coded.bits == 4.25 and coded.top1 >= 0.95 and four.kl < coded.kl < 1e-2
    assert rotated.bits == 3.375 and rotated.top1 >= 0.9 and coded.kl < rotated.kl < 1.7e-2


@pytest.mark.parametrize("form", ["int4", "kvcomp", "rot3"])
def test_the_first_page_is_exact_and_one_that_cannot_be_closed_stays_open(form):
    layout = KVLayout(2, 3, 64, 64, 64, "bfloat16")
    block = Block(*(torch.randn(2, 4, 64, 3, 64).bfloat16() for _ in range(2)))
    block.keys[1, 2, 5, 0, 7] = float("inf")
    before = [each.clone() for each in block.tensors()]
    AtRest(form, layout).pass_through(PagedBlock.whole(block))
    for old, new in zip(before, block.tensors(), strict=True):
        assert [torch.equal(old[:, page], new[:, page]) for page in range(4)] == [True, False, True, False]


@pytest.mark.parametrize("form", ["int4", "kvcomp", "rot3"])
def test_large_channels_of_the_keys_cost_pages_no_more(form):
    """Each row of a tile of keys is a channel: a factor of its own changes no code, but its rounding."""
    layout = KVLayout(1, 2, 64, 64, 64, "bfloat16")
    keys, values = (torch.randn(1, 2, 64, 2, 64).bfloat16() for _ in range(2))
    factor = torch.where(torch.arange(64) % 16 == 0, 16.0, 1.0).bfloat16()
    plain, wide = Block(keys.clone(), values.clone()), Block(keys * factor, values.clone())
    for block in (plain, wide):
        AtRest(form, layout).pass_through(PagedBlock.whole(block))
    assert torch.equal(plain.keys * factor, wide.keys)
    assert not torch.equal(plain.keys, keys)


def test_forms_of_pages_from_the_command_line(capsys):
    held_out = str(Path(DEMO_MODEL) / "heldout.txt")
    flags = ["--contexts", "1", "--context-tokens", "128", "--next-tokens", "8", "--kv-cache", "int8,int4"]
    assert main(["quality", "--text", held_out, *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[3:5]] == [["int8", "pages", "8.50"], ["int4", "pages", "4.50"]]


def test_channels_of_the_keys_that_differ_widely_are_told():
    assert list(warnings([1.0, 8.0])) == []
    (line,) = warnings([9.0, 8.0, 20.0])
    assert line.startswith("warning: channels of the keys differ by more than 8x in layers 0, 2; worst is layer 2")
    measured = Measurement(2.0, 1, (9.0,), (Figures("int8", 8.5, 2.02, 0.01, 0.99, 0.001),))
    text = report(measured, "m", "bfloat16", 64, 8)
    assert text.splitlines()[-1].startswith("warning: ") and "+1.00% ± 0.50%" in text


def test_a_model_with_large_key_channels_is_warned_of():
    loaded = load(tiny_model("qwen3"), "bfloat16")
    before = measure(loaded, windows(1), CONTEXT, []).key_spreads
    with torch.no_grad():
        for channel in (0, 8):  # a rotary pair
            loaded.layers[1].self_attn.k_norm.weight[channel] *= 64
    after = measure(loaded, windows(1), CONTEXT, []).key_spreads
    assert after[1] > 8 > before[1] and after[0] == before[0]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--text", "/nowhere.txt"], "--text /nowhere.txt: No such file or directory; name a readable text file"),
        (["--codecs", "int8,kvcom"], "--codecs: codec 'kvcom' is unknown; did you mean kvcomp?"),
        (["--codecs", "auto"], "--codecs: codec 'auto' is unknown; "),
        (["--kv-cache", "int4,int3"], "--kv-cache: no form of pages is called int3; there are plain, int8, int4"),
        (["--kv-cache", "int4"], "--kv-cache: keys of "),
        (["--contexts", "0"], "--contexts is 0; ask for at least 1"),
        (["--context-tokens", "100"], "--context-tokens is 100; ask for whole pages, a multiple of 64"),
        (["--next-tokens", "0"], "--next-tokens is 0; ask for at least 1"),
        (["--context-tokens", "64000"], "--text: no file has 64009 tokens; name a longer one, or ask for fewer"),
        (["--kv-dtype", "float8_e5m2"], "argument --kv-dtype: invalid choice: 'float8_e5m2'"),
        (["--json", "/nowhere/quality.json"], "--json /nowhere/quality.json is no file in a folder that exists"),
        (["--model", "./nowhere"], "--model: there is no folder ./nowhere; name a folder"),
    ],
)
def test_a_mistake_is_one_line(quality, flags, expected):
    status, out, error = quality(*flags)
    assert (status, out, error.count("\n")) == (2, "", 1)
    assert error.startswith(f"kvrail quality: {expected}")


def test_every_element_type_that_lossy_codecs_take_may_be_asked_for():
    taken = [registry.get(name).dtypes for name in registry.names() if not registry.get(name).exact]
    assert {*DTYPES} == set.union(*map(set, taken))
