"""Windows against brute force, and codebook files: round trips, and every wrong one refused."""

import copy
import json
import math

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvrail.codec.splitzip.one_stage.codebook import MAX_FILE_BYTES, WINDOWS, Codebook, CodebookError, default_codebook
from kvrail.codec.splitzip.one_stage.exponents import (
    best_set,
    best_window,
    coverage,
    entropy_bits,
    histogram,
    set_coverage,
)
from kvrail.codec.splitzip.tiles.format import FORMATS, WindowCode
from kvrail.codec.splitzip.tiles.plan import TensorPlan
from tests.reference import tiles as reference

FINGERPRINT = "0123456789abcdef" * 4


def bits_of(values, dtype):
    tensor = values.to(getattr(torch, dtype))
    return tensor.view(torch.uint8 if tensor.element_size() == 1 else torch.uint16).numpy()


def tensor_windows(tops, layers):
    return {
        "tops": tops,
        "coverage": [0.999] * layers,
        "best_set_coverage": [1.0] * layers,
        "entropy_bits": [2.5] * layers,
    }


def content(shared=False):
    """A good file: three layers, two element types."""
    tops = [[200], [3]] if shared else [[130, 131, 255], [0, 1, 2]]
    small = [[15], [14]] if shared else [[15, 14, 15], [13, 15, 15]]
    return {
        "format": "kvrail-codebook",
        "version": 1,
        "model": "m",
        "model_fingerprint": FINGERPRINT,
        "comment": "text: [1, 2\n, 3]",
        "num_layers": 3,
        "shared": shared,
        "dtypes": {
            dtype: {
                "window": WINDOWS[dtype],
                "tokens": 1024,
                "keys": tensor_windows(keys, 3),
                "values": tensor_windows(values, 3),
            }
            for dtype, (keys, values) in (("bfloat16", tops), ("float8_e4m3fn", small))
        },
    }


def book(shared=False):
    return Codebook.model_validate_json(json.dumps(content(shared)))


histograms = st.lists(st.integers(0, 5), min_size=16, max_size=32).map(np.array)


@given(histograms, st.sampled_from([8, 16]))
def test_the_best_window_is_the_best_of_all_and_the_highest_of_those(counts, width):
    def covered(top):
        return sum(int(counts[(top - distance) % len(counts)]) for distance in range(width))

    most = max(covered(top) for top in range(len(counts)))
    assert best_window(counts, width) == max(top for top in range(len(counts)) if covered(top) == most)
    total = int(counts.sum())
    for top in range(len(counts)):
        assert coverage(counts, top, width) == (covered(top) / total if total else 1.0)


@given(histograms, st.sampled_from([8, 16]))
def test_the_best_set_is_that_of_the_largest_counts(counts, width):
    chosen = best_set(counts, width)
    assert len(set(chosen.tolist())) == len(chosen) == width
    largest = sorted(counts.tolist(), reverse=True)
    assert counts[chosen].tolist() == largest[:width]
    assert set_coverage(counts, chosen) >= max(coverage(counts, top, width) for top in range(len(counts)))


def test_a_window_wraps_around():
    counts = np.zeros(32, np.int64)
    counts[[0, 1, 30, 31]] = 1
    assert coverage(counts, 1, 4) == 1.0
    assert best_window(counts, 4) == 1


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_histogram_counts_exponents_as_the_type_defines_them(dtype):
    generator = torch.Generator().manual_seed(3)
    values = (torch.randn(63, 17, generator=generator) * 8).to(getattr(torch, dtype))
    format = FORMATS[dtype]
    bias = format.exponents // 2 - 1
    expected = [0] * format.exponents
    for value in values.float().flatten().tolist():
        exponent = math.frexp(value)[1] - 1 + bias if value else 0
        expected[max(exponent, 0)] += 1
    assert histogram(bits_of(values, dtype), format).tolist() == expected


def test_the_sign_is_no_part_of_the_exponent():
    specials = torch.tensor([math.inf, -math.inf, math.nan, -0.0, 0.0])
    assert histogram(bits_of(specials, "bfloat16"), FORMATS["bfloat16"])[[0, 255]].tolist() == [2, 3]


@pytest.mark.parametrize(("counts", "bits"), [([5] * 16, 4.0), ([0, 7, 0], 0.0), ([4, 2, 1, 1], 1.75), ([0, 0], 0.0)])
def test_entropy_of_known_distributions(counts, bits):
    assert entropy_bits(np.array(counts)) == pytest.approx(bits, abs=1e-12)


@pytest.mark.parametrize("top", [120, 128, 131, 3])
def test_what_a_window_does_not_cover_is_what_the_code_must_repair(top):
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(1, 1, 7, 33, generator=generator)
    values[..., 0] = 0
    bits = bits_of(values, "bfloat16")
    plan = TensorPlan(FORMATS["bfloat16"], WindowCode(4, per_channel=False, chunk=256), 1, 1, 7, 33)
    dense = np.empty(plan.fixed_bytes, np.uint8)
    records, _ = reference.encode_tensor(bits, np.array([0]), plan, np.array([top]), dense)
    covered = coverage(histogram(bits, FORMATS["bfloat16"]), top, WINDOWS["bfloat16"])
    assert len(records) == round((1 - covered) * bits.size)


@pytest.mark.parametrize("shared", [False, True])
def test_a_file_comes_back_as_it_was(tmp_path, shared):
    path = tmp_path / "book.json"
    book(shared).save(path)
    again = Codebook.load(path)
    assert again == book(shared)
    assert again.id == book(shared).id
    assert json.loads(path.read_text()) == content(shared)
    assert [file.name for file in tmp_path.iterdir()] == ["book.json"]
    assert max(map(len, path.read_text().splitlines())) < 120


def test_tops_of_layers():
    tops = book().tops("bfloat16", "keys", range(1, 3))
    assert (tops.dtype, tops.tolist()) == (np.int64, [131, 255])
    assert book().tops("float8_e4m3fn", "values", range(3)).tolist() == [13, 15, 15]
    assert book().tops("bfloat16", "values", range(0)).shape == (0,)
    assert book(shared=True).tops("bfloat16", "values", range(90, 95)).tolist() == [3] * 5


@pytest.mark.parametrize("layers", [range(4), range(2, 4), range(-1, 2), range(9, 10)])
def test_layers_that_the_codebook_does_not_have(layers):
    with pytest.raises(CodebookError, match=r"of m has 3 layers, and layers -?\d to \d were asked for; use"):
        book().tops("bfloat16", "keys", layers)


def test_an_element_type_that_the_codebook_does_not_have():
    with pytest.raises(CodebookError, match="windows for bfloat16, float8_e4m3fn, not for float16"):
        book().tops("float16", "keys", range(3))


def test_the_id_is_that_of_the_text_in_the_readme():
    text = '{"bfloat16":[16,[130,131,255],[0,1,2]],"float8_e4m3fn":[8,[15,14,15],[13,15,15]]}'
    assert book().id == xxhash.xxh3_64_intdigest(text.encode())


def test_the_id_tells_windows_apart_and_nothing_else():
    def identity(change, shared=False):
        changed = content(shared)
        change(changed)
        return Codebook.model_validate_json(json.dumps(changed)).id

    coding = [
        lambda c: c["dtypes"]["bfloat16"]["keys"]["tops"].__setitem__(1, 132),
        lambda c: c["dtypes"]["float8_e4m3fn"]["values"]["tops"].__setitem__(0, 12),
        lambda c: c["dtypes"].pop("bfloat16"),
        lambda c: c["dtypes"]["bfloat16"].update(
            keys=c["dtypes"]["bfloat16"]["values"], values=c["dtypes"]["bfloat16"]["keys"]
        ),
    ]
    ids = {book().id, book(shared=True).id, *map(identity, coding)}
    assert len(ids) == 2 + len(coding)
    assert all(0 < each < 1 << 64 for each in ids)
    others = [
        lambda c: c.update(model="n", model_fingerprint="", comment=""),
        lambda c: c["dtypes"]["bfloat16"].update(tokens=7),
        lambda c: c["dtypes"]["bfloat16"]["keys"].update(coverage=[0.5, 0, 1], entropy_bits=[1, 2, 3]),
        lambda c: c.update(dtypes=dict(reversed(c["dtypes"].items()))),
    ]
    assert {identity(change) for change in others} == {book().id}


BF16 = ("dtypes", "bfloat16")
WRONG = {
    "format": (("format",), "other", "format is 'other'"),
    "version": (("version",), 2, "version is 2"),
    "version as text": (("version",), "1", "version is '1'"),
    "model": (("model",), 7, "model is 7"),
    "fingerprint": (("model_fingerprint",), "abc", "model_fingerprint is 'abc'"),
    "layers": (("num_layers",), 0, "num_layers is 0"),
    "layers as a fraction": (("num_layers",), 3.5, "num_layers is 3.5"),
    "layers that do not fit": (("num_layers",), 4, "dtypes.bfloat16.keys.tops has 3 entries; it must have 4"),
    "shared": (("shared",), 1, "shared is 1"),
    "shared that does not fit": (("shared",), True, "dtypes.bfloat16.keys.tops has 3 entries; it must have 1"),
    "no types": (("dtypes",), {}, "dtypes is {}"),
    "unknown type": (("dtypes", "int3"), content()["dtypes"]["bfloat16"], "dtypes has 'int3'"),
    "no map": (BF16, 5, "dtypes.bfloat16 is 5"),
    "window": ((*BF16, "window"), 8, "dtypes.bfloat16.window is 8; it must be 16"),
    "tokens": ((*BF16, "tokens"), 0, "dtypes.bfloat16.tokens is 0"),
    "top too large": ((*BF16, "values", "tops"), [1, 2, 256], "dtypes.bfloat16.values.tops has 256; an exponent is"),
    "top of e4m3 too large": (("dtypes", "float8_e4m3fn", "keys", "tops"), [16, 1, 1], "keys.tops has 16"),
    "top below zero": ((*BF16, "keys", "tops"), [-1, 2, 3], "dtypes.bfloat16.keys.tops has -1"),
    "top as text": ((*BF16, "keys", "tops"), [1, "2", 3], "dtypes.bfloat16.keys.tops.1 is '2'"),
    "top as truth": ((*BF16, "keys", "tops"), [1, True, 3], "dtypes.bfloat16.keys.tops.1 is True"),
    "tops for one layer": ((*BF16, "keys", "tops"), [1], "dtypes.bfloat16.keys.tops has 1 entries"),
    "coverage": ((*BF16, "keys", "coverage"), [1, 1, 1.01], "dtypes.bfloat16.keys.coverage.2 is 1.01"),
    "coverage of two layers": ((*BF16, "keys", "coverage"), [1, 1], "dtypes.bfloat16.keys.coverage has 2 entries"),
    "not a number": ((*BF16, "keys", "coverage"), [1, 1, math.nan], "dtypes.bfloat16.keys.coverage.2 is nan"),
    "best set": ((*BF16, "values", "best_set_coverage"), None, "dtypes.bfloat16.values.best_set_coverage is None"),
    "entropy": ((*BF16, "values", "entropy_bits"), [1, 9, 1], "dtypes.bfloat16.values.entropy_bits.1 is 9"),
    "field too many": ((*BF16, "extra"), 1, "dtypes.bfloat16.extra is 1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_field_is_named_with_its_value(tmp_path, case):
    where, value, expected = WRONG[case]
    changed = copy.deepcopy(content())
    inner = changed
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    check_refused(tmp_path, json.dumps(changed).encode(), expected)


def fields(value, at=()):
    for key, inner in value.items():
        yield (*at, key)
        if isinstance(inner, dict):
            yield from fields(inner, (*at, key))


@pytest.mark.parametrize("where", [each for each in fields(content()) if len(each) != 2], ids=".".join)
def test_a_missing_field_is_named(tmp_path, where):
    changed = copy.deepcopy(content())
    inner = changed
    for key in where[:-1]:
        inner = inner[key]
    del inner[where[-1]]
    check_refused(tmp_path, json.dumps(changed).encode(), f"{'.'.join(where)}: field required")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "Invalid JSON"),
        (b"\xff\xfe\x00", "Invalid JSON"),
        (json.dumps(content()).encode()[:-1], "Invalid JSON"),
        (b"[" * 100_000, "Invalid JSON"),
        (b"[]", "the file is []"),
        (b"null", "the file is None"),
        (b" " * (MAX_FILE_BYTES + 1), f"has more than {MAX_FILE_BYTES} bytes"),
    ],
    ids=["empty", "binary", "torn", "deep", "list", "null", "large"],
)
def test_what_is_no_codebook_is_refused(tmp_path, data, expected):
    check_refused(tmp_path, data, expected)


def check_refused(tmp_path, data, expected):
    path = tmp_path / "book.json"
    path.write_bytes(data)
    with pytest.raises(CodebookError) as caught:
        Codebook.load(path)
    message = str(caught.value)
    assert message.startswith(f"codebook {path}")
    assert expected.lower() in message.lower()
    assert message.endswith("correct the file or make it again with kvrail calibrate")
    assert "\n" not in message


def test_a_file_that_cannot_be_read(tmp_path):
    for path in (tmp_path / "nothing.json", tmp_path):
        with pytest.raises(CodebookError, match=f"codebook {path}: .+; name a readable file"):
            Codebook.load(path)


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path):
    target = tmp_path / "folder"
    (target / "inside").mkdir(parents=True)
    for path in (target, tmp_path / "none" / "book.json"):
        with pytest.raises(CodebookError, match=f"codebook {path}: .+; name a file that can be written"):
            book().save(path)
    assert sorted(tmp_path.rglob("*")) == [target, target / "inside"]


def test_a_file_is_replaced_as_a_whole(tmp_path):
    path, before = tmp_path / "book.json", tmp_path / "before"
    book().save(path)
    before.hardlink_to(path)
    book(shared=True).save(path)
    assert Codebook.load(before) == book()
    assert Codebook.load(path) == book(shared=True)


def test_the_default_is_for_any_model_and_every_type():
    default = default_codebook()
    assert default.model_fingerprint == ""
    assert default.shared
    assert set(default.dtypes) == set(FORMATS) == set(WINDOWS)
    for dtype, windows in default.dtypes.items():
        for tensor in (windows.keys, windows.values):
            assert min(tensor.coverage) > (0.98 if dtype == "float8_e4m3fn" else 0.995)


@pytest.mark.parametrize("dtype", ["float8_e5m2", "float8_e4m3fn"])
def test_the_default_of_scaled_types_ends_at_the_largest_magnitude(dtype):
    limit = torch.tensor([torch.finfo(getattr(torch, dtype)).max])
    top = int(histogram(bits_of(limit, dtype), FORMATS[dtype]).argmax())
    for kind in ("keys", "values"):
        assert default_codebook().tops(dtype, kind, range(2)).tolist() == [top, top]


def test_the_default_of_float16_is_that_of_bfloat16():
    for kind in ("keys", "values"):
        wide, narrow = (default_codebook().tops(dtype, kind, range(1))[0] for dtype in ("bfloat16", "float16"))
        assert wide - 127 == narrow - 15
