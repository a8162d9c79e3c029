"""Forms of pages: one contract, whatever they keep."""

from dataclasses import replace

import pytest

from kvrail.engine.kv.cache import PagedCache
from kvrail.engine.kv.formats import FORMATS, format_of
from kvrail.values.layout import DTYPE_BYTES, KVLayout

LAYOUT = KVLayout(4, 2, 8, 6, 16, "bfloat16")


@pytest.mark.parametrize(
    ("dtype", "name"), [(d, "scaled" if size == 1 else "plain") for d, size in DTYPE_BYTES.items()]
)
def test_the_element_type_has_a_form(dtype: str, name: str) -> None:
    layout = replace(LAYOUT, dtype=dtype)
    assert format_of(layout) is FORMATS[name] and FORMATS[name].name == name


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_a_pool_has_the_tensors_of_its_form(dtype: str) -> None:
    layout = replace(LAYOUT, dtype=dtype)
    cache, tensors = PagedCache(layout, 3, "cpu"), format_of(layout).tensors(layout)
    assert list(cache.tensors) == list(tensors)
    for name, pool in cache.tensors.items():
        assert pool.shape == (4, 3, *tensors[name].shape) and pool.dtype == tensors[name].dtype
        assert (pool.float() == tensors[name].fill).all()
    assert cache.bytes == 3 * format_of(layout).page_bytes(layout)
    for part, pool in zip(cache.layer(2).tensors(), cache.tensors.values(), strict=True):
        assert part.data_ptr() == pool[2].data_ptr() and part.shape == pool.shape[1:]


def test_workers_of_one_model_agree_whatever_form_their_pages_have() -> None:
    assert replace(LAYOUT, page_format="plain") == LAYOUT == replace(LAYOUT, page_format="another")
    assert replace(LAYOUT, page_size=32) != LAYOUT
    assert format_of(replace(LAYOUT, page_format="plain")) is FORMATS["plain"]
