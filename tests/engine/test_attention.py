"""The CPU path against the readable reference, which itself is checked against torch's attention."""

import random

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kvrail.engine.attention import cpu, cpu_kernel, reference
from kvrail.engine.attention.meta import Extents, StepMeta, decode
from kvrail.engine.attention.options import ScoreOptions
from kvrail.engine.batch.batch import SequenceSlice
from kvrail.engine.batch.inputs import fill_meta
from kvrail.engine.batch.packing import most_blocks, pack, query_blocks
from tests.engine.attention_cases import Case, expected, make_case, relative_error

MIXES = {
    "decodes": [(1, n) for n in (1, 2, 15, 16, 17, 64, 150, 151, 700)],
    "prefills": [(5, 5), (30, 65), (16, 32), (2, 100)],
    "mixed": [(1, 40), (7, 7), (1, 300), (20, 33)],
}
OPTIONS = {
    "plain": {},
    "window": {"window": 17},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": True},
    "all": {"window": 33, "softcap": 5.0, "sinks": True},
    "odd shape": {"heads": 6, "kv_heads": 3, "key_dim": 24, "value_dim": 40},
    "narrow": {"key_dim": 8, "value_dim": 12, "kv_dtype": "bfloat16"},
    "wide": {"key_dim": 192, "value_dim": 136, "kv_dtype": "bfloat16"},
    "large pages": {"page_size": 256},
    "e5m2": {"kv_dtype": "float8_e5m2", "window": 50},
    "e4m3": {"kv_dtype": "float8_e4m3fn"},
    "bfloat16": {"kv_dtype": "bfloat16"},
    "float16": {"kv_dtype": "float16"},
}


def meta_of(case: Case) -> StepMeta:
    return StepMeta(case.slots.int(), case.page_tables, case.plan)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("plan", MIXES.values(), ids=MIXES)
def test_cpu_path_matches_reference(plan: list, options: dict) -> None:
    case = make_case(plan, **options)
    wanted = expected(case)
    out = attend(case)
    assert out.dtype == case.query.dtype
    assert relative_error(out, wanted) < 1e-5


def attend(case: Case) -> torch.Tensor:
    return cpu.paged_attention(case.query, case.key, case.value, case.pages, meta_of(case), case.options)


def test_any_number_of_threads_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_PRODUCTS_PER_THREAD", 1)
    found = []
    for threads in (1, 3, 50):
        monkeypatch.setattr(cpu, "_THREADS", threads)
        found.append(attend(make_case(MIXES["mixed"], kv_dtype="bfloat16")))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("window", [0, 16, 100])
def test_a_token_gets_the_same_bits_alone_and_among_others(window: int) -> None:
    case = make_case([(30, 265)], window=window, kv_dtype="bfloat16")
    together = attend(case)
    query, case.key, case.value, case.slots = case.query, case.key[:0], case.value[:0], case.slots[:0]
    for row in range(len(query)):
        case.query, case.plan = query[row : row + 1], [(1, 236 + row)]
        assert torch.equal(attend(case)[0], together[row])


def test_an_error_in_another_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_THREADS", 2)
    monkeypatch.setattr(cpu, "_PRODUCTS_PER_THREAD", 1)
    monkeypatch.setattr(cpu, "attend_units", lambda units, **_: 1 // (len(units) - 1))
    with pytest.raises(ZeroDivisionError):
        attend(make_case([(1, 40), (1, 41), (1, 42)], kv_heads=1))


def test_what_is_not_finite_stays_in_its_sequence() -> None:
    case = make_case([(1, 40), (3, 90), (1, 70)])
    first_row_of = {0: 0, 1: 1, 2: 2}
    page = case.page_tables[1, 0].long()
    case.pages.keys[page, 3] = float("nan")
    out = attend(case)
    lost = out.flatten(1).isnan().any(1).tolist()
    assert lost == [first_row_of[1] == row for row in range(2)] + [False] * (len(lost) - 2)


@pytest.mark.parametrize("dtype", cpu._KINDS, ids=str)
def test_every_element_is_widened_as_torch_does(dtype: torch.dtype) -> None:
    patterns = {1: torch.uint8, 2: torch.uint16, 4: torch.int32}[dtype.itemsize]
    values = torch.arange(1 << min(16, 8 * dtype.itemsize)) * (1 if dtype.itemsize < 4 else 0x10001)
    stored = values.to(patterns).view(dtype)
    found = np.empty(len(stored), np.float32)
    for at in range(0, len(stored), 16):
        byte = at * dtype.itemsize
        cpu_kernel._widen(cpu._KINDS[dtype], stored.view(torch.uint8).numpy(), byte, found, at, np.float32(1))
    wanted = stored.float().numpy()
    np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))
    real = ~np.isnan(wanted)
    np.testing.assert_array_equal(found[real].view(np.int32), wanted[real].view(np.int32))


def test_weights_are_exponentials() -> None:
    scores = np.concatenate([-np.logspace(-8, np.log10(86), 4000), np.zeros(64)]).astype(np.float32)
    found, bits = scores.copy(), np.empty(len(scores), np.int32)
    cpu_kernel._exponentials(found, np.float32(0), bits, bits.view(np.float32))
    np.testing.assert_allclose(found, np.exp(scores.astype(np.float64)), rtol=2.4e-7)


def test_reference_matches_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, h, 16, generator=generator) for n, h in ((7, 6), (20, 2), (20, 2)))
    ours = reference.attend_eager(q, k, v, ScoreOptions(0.3))
    mask = torch.ones(7, 20, dtype=torch.bool).tril(13)
    theirs = scaled_dot_product_attention(
        *(t.transpose(0, 1)[None] for t in (q, k, v)), attn_mask=mask, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(ours, theirs[0].transpose(0, 1))


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fn])
def test_eight_bit_rows_keep_their_largest_value(dtype: torch.dtype) -> None:
    x = torch.randn(50, 3, 64) * torch.logspace(-20, 20, 50)[:, None, None]
    x[4] = 0
    stored, scale = reference.quantise(x, dtype)
    back = stored.float() * scale[..., None]
    step = 2.0 ** -(3 if dtype == torch.float8_e5m2 else 4)
    assert back.isfinite().all() and (back[4] == 0).all()
    largest = x.abs().amax(-1)
    torch.testing.assert_close(back.abs().amax(-1), largest, rtol=1e-6, atol=0)
    assert ((back - x).abs() <= (step * x.abs()).maximum(largest[..., None] * 1e-4)).all()


def test_meta_survives_the_way_through_the_model() -> None:
    packed = pack([SequenceSlice([5], 8, [2, 7], 1), SequenceSlice([1, 2, 3], 0, [5], 1)], page_size=8)
    extents = Extents(tokens=6, sequences=3, width=4, rows=2, blocks=5, kv_heads=3)
    data = np.full(extents.words(), 9, np.int32)
    fill_meta(extents.sections(data), packed, query_blocks(packed, 2, 6), programs=8)
    back = decode(torch.from_numpy(data), extents.plan())
    assert back.slots.tolist() == [-1, 40, 41, 42, -1, -1]  # one new token alone is stored by attention itself
    assert back.page_tables[:2].tolist() == [[2, 7, 9, 9], [5, 0, 9, 9]]
    assert back.kv_lens.tolist() == [9, 0]
    assert back.blocks.tolist() == [[3, 1, 2, 1], [1, 2, 0, 1], [4, 2, 0, -1], [0] * 4, [0] * 4]
    assert len(back.counters) == 6
    assert back.shares[:2].tolist() == [[0, 0, 1], [1, 0, 1]] and (back.shares[2:] == -1).all()
    for section in (back.slots, back.page_tables, back.kv_lens, back.shares, back.counters, back.blocks):
        assert section.dtype == torch.int32
        assert section.data_ptr() % 16 == torch.from_numpy(data).data_ptr() % 16


@pytest.mark.parametrize("most", [1, 16, 64])
def test_blocks_hold_every_query_once_and_fit(most: int) -> None:
    choice = random.Random(most)
    for _ in range(200):
        new = [choice.choice([1, 2, 3, 17, 64, 65, 130]) for _ in range(choice.randint(1, 6))]
        start = [choice.randint(0, 90) for _ in new]
        slices = [SequenceSlice([0] * n, s, range(40), 0) for n, s in zip(new, start, strict=True)]
        packed = pack(slices, 8)
        tokens = len(packed.token_ids)
        size = tokens + choice.randint(0, 70)
        blocks = query_blocks(packed, most, size)
        assert len(blocks) <= most_blocks(size, len(new), most)
        assert (blocks[:, 1] <= most).all()
        real = blocks[blocks[:, 3] >= 0]
        assert (np.diff(real[:, 2] + real[:, 1]) <= 0).all()  # what takes longest first
        seen = {first + i: (sequence, at + i) for first, n, at, sequence in blocks.tolist() for i in range(n)}
        assert sorted(seen) == list(range(packed.decodes, size))
        for token in range(packed.decodes, tokens):
            sequence, at = seen[token]
            assert at == packed.positions[token]
            assert packed.slots[token] == packed.page_tables[sequence, at // 8] * 8 + at % 8
