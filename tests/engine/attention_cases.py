"""Random paged attention problems with the answer that the reference gives."""

from dataclasses import dataclass

import torch

from kvrail.engine.attention import reference
from kvrail.engine.attention.options import ScoreOptions
from kvrail.engine.attention.shares import shares_of
from kvrail.engine.kv.cache import PagedCache
from kvrail.engine.kv.formats import LayerPages
from kvrail.values.layout import KVLayout


@dataclass
class Case:
    """A packed step over one layer whose pages hold everything before the new tokens."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    pages: LayerPages
    slots: torch.Tensor
    page_tables: torch.Tensor
    plan: list[tuple[int, int]]
    options: ScoreOptions

    @property
    def decodes(self) -> int:
        return sum(new == 1 for new, _ in self.plan)

    @property
    def kv_lens(self) -> torch.Tensor:
        lengths = [total for _, total in self.plan[: self.decodes]]
        return torch.tensor(lengths, dtype=torch.int32, device=self.query.device)

    def blocks(self, most: int, padding: int = 0) -> torch.Tensor:
        """Queries of all sequences with more than one, last ones first; then `padding` tokens, and a block of none."""
        found, begin = [], 0
        for row, (new, total) in enumerate(self.plan):
            for first in range(0, new if row >= self.decodes else 0, most):
                found.insert(0, [begin + first, min(most, new - first), total - new + first, row])
            begin += new
        found += [[begin + first, min(most, padding - first), 0, -1] for first in range(0, padding, most)]
        return torch.tensor([*found, [7, 0, 7, 7]], dtype=torch.int32, device=self.query.device)

    @property
    def stored_apart(self) -> torch.Tensor:
        """Slots, -1 where attention of one new token stores it."""
        slots = self.slots.int().clone()
        slots[: self.decodes] = -1
        return slots


def shares(kv_lens: torch.Tensor, kv_heads: int, slots: int) -> torch.Tensor:
    """StepMeta.shares."""
    return torch.from_numpy(shares_of(kv_lens.cpu().numpy(), kv_heads, slots)).int().to(kv_lens.device)


def make_case(
    plan: list[tuple[int, int]],
    *,
    heads: int = 8,
    kv_heads: int = 2,
    key_dim: int = 64,
    value_dim: int = 64,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    kv_dtype: str = "float32",
    window: int = 0,
    softcap: float = 0.0,
    sinks: bool = False,
    device: str = "cpu",
    seed: int = 0,
    scale: float = 0.0,
) -> Case:
    """Sequences of `plan` (new tokens, tokens in all) on shuffled pages; pages nobody owns hold NaN."""
    plan = sorted(plan, key=lambda entry: entry[0] > 1)
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    need = [-(-total // page_size) for _, total in plan]
    count = sum(need) + 3
    order = torch.randperm(count, generator=generator).tolist()
    cache = PagedCache(KVLayout(1, kv_heads, key_dim, value_dim, page_size, kv_dtype), count, device)
    layer = cache.layer(0)
    poison(layer)
    tables = torch.full((len(plan), max(need)), order[-1], dtype=torch.int32)
    slots, begin = [], 0
    for row, ((new, total), pages) in enumerate(zip(plan, need, strict=True)):
        tables[row, :pages] = torch.tensor(order[begin : begin + pages])
        begin += pages
        token = torch.arange(total)
        where = tables[row, token // page_size].long() * page_size + token % page_size
        slots.append(where[total - new :])
        old = where[: total - new].to(device)
        k, v = draw(total - new, kv_heads, key_dim), draw(total - new, kv_heads, value_dim)
        reference.write_pages(layer, k.to(device, dtype), v.to(device, dtype), old)
    tokens = sum(new for new, _ in plan)
    options = ScoreOptions(scale or key_dim**-0.5, window, softcap, draw(heads).to(device, dtype) if sinks else None)
    return Case(
        query=draw(tokens, heads, key_dim).to(device, dtype) * 2,
        key=draw(tokens, kv_heads, key_dim).to(device, dtype),
        value=draw(tokens, kv_heads, value_dim).to(device, dtype),
        pages=layer,
        slots=torch.cat(slots).to(device),
        page_tables=tables.to(device),
        plan=plan,
        options=options,
    )


def poison(layer: LayerPages) -> None:
    """Fill pages with NaN (in types that have one), so that a read of a slot nobody wrote shows."""
    for pool, scales in layer.pairs:
        pool.view(torch.uint8).fill_(0xFF)
        if scales is not None:
            scales.fill_(float("nan"))


def expected(case: Case) -> torch.Tensor:
    """What the reference computes, in float64, from the elements as the pages keep them."""
    layer = LayerPages(*(tensor.clone() for tensor in case.pages.tensors()))
    reference.write_pages(layer, case.key, case.value, case.slots)
    out = torch.empty(*case.query.shape[:2], case.value.shape[2], dtype=torch.float64, device=case.query.device)
    page_size, begin = layer.keys.shape[1], 0
    for row, (new, total) in enumerate(case.plan):
        pages = case.page_tables[row, : -(-total // page_size)].long()
        k, v = reference.read_pages(layer, pages, torch.float64)
        query = case.query[begin : begin + new].double()
        out[begin : begin + new] = reference.attend_eager(query, k[:total], v[:total], case.options)
        begin += new
    return out


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """‖found - wanted‖ / ‖wanted‖ in float64; NaN stays NaN and passes no comparison."""
    return float((found.double() - wanted).norm() / wanted.norm())
