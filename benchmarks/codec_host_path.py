"""The codecs' way from pages on a GPU to payloads in pinned memory and back, beside plain pinned copies.

    python -m benchmarks.codec_host_path [--codecs LIST] [--mib 4,16,64] [--out FOLDER]

Each row is checked first: the last stage of an exact codec restores every bit. Rates are bytes of uncompressed KV a
second by the wall clock, medians of warm runs. encode: `encode` and `stages`, until payloads are there. decode: all
stages from payloads that lie in one pinned region, until the stream is done. µs: until `encode`, or `decode` of all
stages, has returned, which is what the host needs to launch it and to check payloads. copies: a plain copy of the same
KV bytes from the device to pinned memory, and back. held: encode while the payloads of the last eight are kept.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvrail.codec import registry
from kvrail.codec.base import Block, Codec, PagedBlock, Payload
from kvrail.codec.core.digest import digest_of

LAYERS, PAGE_SIZE, HEADS, DIM = 4, 64, 8, 128
PAGE_MIB = LAYERS * PAGE_SIZE * HEADS * DIM * 2 * 2 / (1 << 20)
"""Shape of a page of all layers, keys and values, bfloat16."""
CODECS = (
    "raw",
    "splitzip",
    "splitzip-channel",
    "splitzip-ans",
    "splitzip-progressive-ans",
    "lynx-exact",
    "int8",
)
MOST_RUNS, MOST_S = 30, 0.25
"""Bounds of a measurement."""
HELD = 8
Runs = Callable[[], Any]


def kv(mib: int) -> PagedBlock:
    """Scattered pages of normal values in channels of log-normal scales, in a pool half as large again."""
    count = round(mib / PAGE_MIB)
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (LAYERS, count + count // 2 + 1, PAGE_SIZE, HEADS, DIM)

    def tensor() -> torch.Tensor:
        scales = torch.exp(0.5 * torch.randn(shape[-2:], generator=generator, device="cuda"))
        return (torch.randn(shape, generator=generator, device="cuda") * scales).to(torch.bfloat16)

    order = torch.randperm(shape[1], generator=torch.Generator().manual_seed(0))
    return PagedBlock(Block(tensor(), tensor()), range(LAYERS), order[:count].tolist())


def timed(call: Runs) -> tuple[float, float]:
    """Median seconds of a call until the stream is done, and until it returned; its first two runs do not count."""
    whole, launch, begun = [], [], time.perf_counter()
    while len(whole) < MOST_RUNS and (len(whole) < 5 or time.perf_counter() - begun < MOST_S):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        kept = call()
        launch.append(time.perf_counter() - begin)
        torch.cuda.current_stream().synchronize()
        whole.append(time.perf_counter() - begin)
        del kept
    return statistics.median(whole[2:]), statistics.median(launch[2:])


def in_region(payloads: list[Payload]) -> list[Payload]:
    """The same payloads in one pinned region, as a transport leaves them; those on a device stay."""
    sizes = [-(-payload.nbytes // 4096) * 4096 for payload in payloads]
    region, placed, begin = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True).numpy(), [], 0
    for payload, size in zip(payloads, sizes, strict=True):
        if isinstance(payload, torch.Tensor):
            return payloads
        region[begin : begin + payload.nbytes] = payload
        placed.append(region[begin : begin + payload.nbytes].data)
        begin += size
    return placed


def decode_all(codec: Codec, payloads: list[Payload], out: PagedBlock) -> None:
    """Every stage in its turn."""
    for stage in range(codec.num_stages):
        codec.decode(stage, payloads[: stage + 1], out)


def measure(name: str, pages: PagedBlock, *, on_device: bool = False) -> dict[str, object]:
    """One row. Raises SystemExit where bits are not restored."""
    codec, raw_bytes = registry.get(name), pages.spec.raw_bytes
    out = PagedBlock(Block(*(torch.zeros_like(each) for each in pages.pools.tensors())), pages.layers, pages.page_ids)
    begin = time.perf_counter()
    payloads = in_region(codec.encode(pages, on_device=on_device).stages())
    decode_all(codec, payloads, out)
    torch.cuda.synchronize()
    first_s = time.perf_counter() - begin
    if codec.exact and not all(
        torch.equal(sent.view(torch.int16), got.view(torch.int16))
        for sent, got in zip(pages.gather().tensors(), out.gather().tensors(), strict=True)
    ):
        raise SystemExit(f"{name} is not lossless; nothing was timed")
    held: list[list[Payload]] = []

    def encode_and_hold() -> None:
        held.append(codec.encode(pages, on_device=on_device).stages())
        del held[:-HELD]

    encode_s, _ = timed(lambda: codec.encode(pages, on_device=on_device).stages())
    _, launch_s = timed(lambda: codec.encode(pages, on_device=on_device))
    decode_s, decode_launch_s = timed(lambda: decode_all(codec, payloads, out))
    held_s, _ = timed(encode_and_hold)
    return {
        "codec": f"{name}, on device" if on_device else name,
        "MiB": raw_bytes >> 20,
        "ratio": raw_bytes / sum(payload.nbytes for payload in payloads),
        "encode GB/s": raw_bytes / encode_s / 1e9,
        "encode µs": 1e6 * launch_s,
        "held GB/s": raw_bytes / held_s / 1e9,
        "decode GB/s": raw_bytes / decode_s / 1e9,
        "decode µs": 1e6 * decode_launch_s,
        "first s": first_s,
    }


def copies(pages: PagedBlock) -> dict[str, object]:
    """Plain copies of as many bytes, and digests of them where they lie."""
    size = pages.spec.raw_bytes
    device = torch.zeros(size, dtype=torch.uint8, device="cuda")
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    away, _ = timed(lambda: host.copy_(device, non_blocking=True))
    back, _ = timed(lambda: device.copy_(host, non_blocking=True))
    lanes, _ = timed(lambda: digest_of(device))
    xxh3, _ = timed(lambda: digest_of(host.numpy().data))
    rates = {"to host": away, "to device": back, "digest on device": lanes, "digest on host": xxh3}
    return {"MiB": size >> 20, **{f"{name} GB/s": size / seconds / 1e9 for name, seconds in rates.items()}}


def table(rows: list[dict[str, object]]) -> str:
    """Rows in Markdown."""
    head = list(rows[0])
    lines = [head, ["---"] * len(head)]
    lines += [[f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row.values()] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(argv: list[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.codec_host_path", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--codecs", default=",".join(CODECS), help=f"of {', '.join(registry.names())}")
    parser.add_argument("--mib", default="4,16,64", help="sizes of the KV, multiples of 1")
    parser.add_argument("--out", type=Path, help="folder for codec-host-path.json")
    options = parser.parse_args(argv)
    rows, plain = [], []
    with torch.cuda.stream(torch.cuda.Stream()):
        for mib in map(int, options.mib.split(",")):
            pages = kv(mib)
            torch.cuda.synchronize()
            plain.append(copies(pages))
            for name in options.codecs.split(","):
                rows.append(measure(name, pages))
                if registry.get(name).device_payloads:
                    rows.append(measure(name, pages, on_device=True))
    facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "copies": plain, "codecs": rows}
    print(f"{facts['device']}, torch {facts['torch']}\n\n{table(plain)}\n\n{table(rows)}")
    if options.out:
        (options.out / "codec-host-path.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
