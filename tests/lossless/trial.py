"""Which part of closing or opening differs on a GPU."""

import torch
from benchmarks.kv_formats import draw, layout_of, timed
from kvrail.engine.kv.lossless.form import Tile
from kvrail.engine.kv.lossless.pages import ClosedPages
from tests.lossless.cases import pools
from kvrail.values.layout import KVLayout


def say(*a):
    print(*a, flush=True)


def compare(name, keys, values, heads, layers):
    L, n, page, H, D = keys.shape
    lay = KVLayout(layers, heads, D, values.shape[4], page, "bfloat16")
    every = torch.arange(n)
    a = ClosedPages(lay, n, 4000, "cpu")
    a.close(keys, values, every, every)
    b = ClosedPages(lay, n, 4000, "cuda")
    f = b.close(keys.cuda(), values.cuda(), every.cuda(), every.cuda())
    say(name, "closed on GPU, failed", int(f), "free", int(a.free[0]), int(b.free[0]))
    kb = Tile(D).bytes
    for kind, x, y, dim in (
        ("K", a.pages[..., :kb], b.pages[..., :kb].cpu(), D),
        ("V", a.pages[..., kb:], b.pages[..., kb:].cpu(), values.shape[4]),
    ):
        t = Tile(dim)
        for part, lo, hi in (
            ("low", 0, t.nibbles),
            ("nibbles", t.nibbles, t.bases),
            ("bases", t.bases, t.escapes),
            ("escapes", t.escapes, t.bytes),
        ):
            d = x[..., lo:hi] != y[..., lo:hi]
            at = d.nonzero()[0].tolist() if d.any() else None
            say(
                " ",
                kind,
                part,
                int(d.sum()),
                "of",
                d.numel(),
                "differ; first",
                at,
                None if at is None else (int(x[..., lo:hi][tuple(at)]), int(y[..., lo:hi][tuple(at)])),
            )
    for source, what in ((a, "CPU-closed"), (b, "GPU-closed")):
        c = ClosedPages(lay, n, 4000, "cuda")
        c.pages.copy_(source.pages)
        c.spare.copy_(source.spare)
        o = [torch.zeros_like(p, device="cuda") for p in (keys, values)]
        c.open(*o, every.cuda(), every.cuda())
        for kind, p, q in zip("KV", (keys, values), o):
            d = p.view(torch.int16) != q.cpu().view(torch.int16)
            at = d.nonzero()[0].tolist() if d.any() else None
            say(
                "  open",
                what,
                kind,
                int(d.sum()),
                "of",
                d.numel(),
                "differ; first",
                at,
                None
                if at is None
                else (
                    hex(int(p.view(torch.int16)[tuple(at)]) & 65535),
                    hex(int(q.view(torch.int16)[tuple(at)]) & 65535),
                ),
            )


torch.manual_seed(0)
compare("normal", *(torch.stack([draw(4, 0)] * 2) for _ in range(2)), 8, 2)
compare("odd 128", *pools(64, (128, 128), 1, 2), 2, 1)
compare("odd 64/128", *pools(128, (64, 128), 1, 2), 2, 1)
k = draw(128, 0).cuda().expand(36, 128, 64, 8, 128).contiguous()
v = draw(128, 0).cuda().expand(36, 128, 64, 8, 128).contiguous()
c = ClosedPages(layout_of(36), 128, 4000, "cuda")
e = torch.arange(128, device="cuda")
for name, f in (("close", c.close), ("open", c.open)):
    t = timed(lambda: f(k, v, e, e))
    say(name, f"{t:.0f} us, {2 * k.nbytes / t / 1e3:.0f} GB/s")
