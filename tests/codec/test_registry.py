"""The registry is open: a codec of another package is found by its entry point, and moves pages like ours."""

import subprocess
import sys

import pytest
import torch
from kv_blocks import bits_of, random_block, scattered, spec_of

from kvrail.codec import registry
from kvrail.codec.base import PagedBlock

INFO = """
from kvrail.codec.registry import CodecInfo

INFO = CodecInfo("flipped", "flipped.codec:FlippedCodec", compiles_on=frozenset())
"""
CODEC = """
from kvrail.codec.raw.codec import RawCodec


class FlippedCodec(RawCodec):
    def __init__(self):
        super().__init__()
        self.name = "flipped"
"""


@pytest.fixture
def site(tmp_path):
    """A folder with the package `flipped`, installed, on the path."""
    (tmp_path / "flipped").mkdir()
    for name, text in (("__init__", ""), ("info", INFO), ("codec", CODEC)):
        (tmp_path / "flipped" / f"{name}.py").write_text(text)
    about = tmp_path / "flipped-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: flipped\nVersion: 1\n")
    return tmp_path


def offer(site, line):
    (site / "flipped-1.dist-info" / "entry_points.txt").write_text(f"[kvrail.codecs]\n{line}\n")


@pytest.fixture
def opened(site, monkeypatch):
    """The registry as a process has it that starts with `site` on its path."""
    monkeypatch.syspath_prepend(site)
    monkeypatch.setattr(registry, "_codecs", dict(registry._codecs))
    registry._load_entry_points.cache_clear()
    yield site
    registry._load_entry_points.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "flipped"]:
        del sys.modules[name]


def test_a_codec_of_another_package_moves_pages(opened):
    offer(opened, "flipped = flipped.info:INFO")
    assert "flipped" in registry.names()
    codec, spec = registry.get("flipped"), spec_of((2, 3, 16, 2, 24, 40), "bfloat16")
    source, out = scattered(spec, 1), scattered(spec, 2)
    codec.decode(0, codec.encode(source).stages(), out)
    assert codec.name == "flipped" and bits_of(out.gather()) == bits_of(source.gather())


def test_names_and_infos_need_no_torch(site):
    offer(site, "flipped = flipped.info:INFO")
    code = (
        "import sys; from kvrail.codec import registry; assert not registry.info('flipped').auto;"
        "assert 'flipped' in registry.names(); assert 'torch' not in sys.modules"
    )
    path = f"sys.path.insert(0, {str(site)!r}); "
    done = subprocess.run([sys.executable, "-c", "import sys; " + path + code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("what", ["other = flipped.info:INFO", "flipped = flipped.info:CodecInfo", "x = absent:INFO"])
def test_an_entry_point_that_is_no_codec_of_its_name_is_refused_by_name_and_stops_no_other_codec(opened, what):
    offer(opened, what)
    assert registry.get("raw").name == "raw"
    with pytest.raises(ValueError, match=what):
        registry.names()


def test_a_name_is_one_codecs_alone(monkeypatch):
    monkeypatch.setattr(registry, "_codecs", dict(registry._codecs))
    registry.register(registry.info("raw"))  # again is no other
    with pytest.raises(ValueError, match=r"'raw'.*kvrail\.codec\.raw\.codec:RawCodec and other:Codec"):
        registry.register(registry.CodecInfo("raw", "other:Codec"))


def test_what_is_said_of_a_codec_is_so():
    for name in registry.names():
        info, codec = registry.info(name), registry.get(name)
        assert (info.name, info.exact) == (codec.name, codec.exact) and info.compiles_on <= registry.DEVICES
        assert info.exact or not info.auto


def test_a_codebook_goes_to_the_codec_that_takes_one_alone():
    block = random_block(spec_of((1, 2, 16, 2, 32, 32), "bfloat16"))
    for name in registry.names():
        assert registry.get(name, None).encode(PagedBlock.whole(block)).stages()
    with pytest.raises(AttributeError):
        registry.get("splitzip", torch.nn)  # no codebook: it is asked for its id
