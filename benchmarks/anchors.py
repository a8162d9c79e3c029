"""Which coarse form of KV to send first: drafts that it gets accepted, for its size.

    python -m benchmarks.anchors [--only TEXT] [--tokens 768,1280] [--threads 1] [--out FOLDER]

Contexts are text that the demo model has not seen. For each candidate their KV is replaced by what a decode worker
would hold after stage 0; the drafts' own KV is exact. Accepted is the length of the common prefix with the exact
cache's continuation, of 64 drafts after the first token, which the prefill worker sends. Writes NAME.md and NAME.json.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks import anchor_drafts, codec_report
from benchmarks.anchor_drafts import Group, Model
from benchmarks.anchor_quantisers import (
    CHANNEL,
    TOKEN,
    Quantiser,
    coded,
    error_bounded,
    fixed_point,
    levels,
    lynx,
    planes,
    uniform,
)

LAYERS = 8
EXACT_BITS = 11.25
"""What a value costs that is sent exactly in stage 0: `splitzip-channel`, about."""
SAMPLED = ("fixed point K5 V4, last 64", "K2 V2, last 64", "INT4 K channel, V token, last 64")


@dataclass(frozen=True)
class Candidate:
    """A stage 0. keys, values: how each layer's are coarsened; recent, first: tokens sent exactly at either end."""

    name: str
    keys: Sequence[Quantiser]
    values: Sequence[Quantiser]
    recent: int = 0
    first: int = 0


@dataclass(frozen=True)
class Result:
    """Figures of a candidate. bits_1k, bits_4k: stage 0 with the exact tokens, for contexts of 1,024 and 4,096 tokens.

    total: bits a value of all stages; coded: bits_1k with codes entropy-coded; vnmse: of attention's outputs.
    """

    name: str
    bits: float
    bits_1k: float
    bits_4k: float
    coded: float
    total: float
    nmse_keys: float
    nmse_values: float
    vnmse: float
    accepted: float
    error: float
    at_least_10: float
    at_least_20: float


def uniform_layers(name: str, keys: Quantiser, values: Quantiser, recent: int = 0, first: int = 0) -> Candidate:
    """One quantiser for all layers."""
    return Candidate(name, [keys] * LAYERS, [values] * LAYERS, recent, first)


def candidates() -> list[Candidate]:
    """Those of the table, in its order."""
    return [*progressive(), *quantised()]


def progressive() -> list[Candidate]:
    """Those whose later stages need nothing twice: planes of the window code, and fixed point."""
    found = [uniform_layers("exact", planes(7, escapes_first=True), planes(7, escapes_first=True))]
    for k, v in ((1, 1), (2, 1), (3, 2)):
        old = (planes(k, escapes_first=True, midpoint=False), planes(v, escapes_first=True, midpoint=False))
        found.append(uniform_layers(f"K{k} V{v}, lower end, escapes first", *old))
    found.append(uniform_layers("K2 V1, escapes first", planes(2, escapes_first=True), planes(1, escapes_first=True)))
    for k, v in ((1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (3, 2)):
        found.append(uniform_layers(f"K{k} V{v}", planes(k), planes(v)))
    for k, v in ((1, 1), (2, 1), (2, 2)):
        found.append(uniform_layers(f"K{k} V{v}, last 64", planes(k), planes(v), 64))
    for recent, first in ((0, 4), (16, 0), (64, 4), (128, 0)):
        found.append(uniform_layers(f"K2 V1, last {recent}, first {first}", planes(2), planes(1), recent, first))
    for name, fine in (("first 2", (0, 1)), ("last 2", (6, 7))):
        keys, values = ([planes(m + (layer in fine)) for layer in range(LAYERS)] for m in (2, 1))
        found.append(Candidate(f"K2 V1, one bit more in the {name} layers", keys, values))
    for recent in (0, 16, 64):
        name = f"levels K2 V1, last {recent}" if recent else "levels K2 V1"
        found.append(uniform_layers(name, levels(2), levels(1), recent))
    for k, v in ((2, 1), (2, 2), (3, 1), (3, 2)):
        found.append(uniform_layers(f"coded K{k} V{v}, last 16", coded(k), coded(v), 16))
    return [*found, *_fixed_points()]


def _fixed_points() -> list[Candidate]:
    found = []
    for k, v in ((4, 4), (5, 4), (5, 5)):
        found.append(uniform_layers(f"fixed point K{k} V{v}", fixed_point(k), fixed_point(v)))
    for k, v in ((4, 4), (5, 4), (5, 5)):
        for recent in (16, 64):
            name = f"fixed point K{k} V{v}, last {recent}"
            found.append(uniform_layers(name, fixed_point(k), fixed_point(v), recent))
    return found


def quantised() -> list[Candidate]:
    """Quantisers, behind which a residual must travel."""
    int4 = (uniform(4, CHANNEL), uniform(4, TOKEN))
    found = []
    found.append(uniform_layers("INT4 K channel, V token", *int4))
    for recent in (16, 64):
        found.append(uniform_layers(f"INT4 K channel, V token, last {recent}", *int4, recent))
    found.append(uniform_layers("INT4 both token", int4[1], int4[1]))
    found.append(uniform_layers("INT4 both channel", int4[0], int4[0]))
    found.append(uniform_layers("INT4 both token, last 64, first 4", int4[1], int4[1], 64, 4))
    found.append(uniform_layers("KVComp 0.05", error_bounded(0.05, CHANNEL), error_bounded(0.05, TOKEN)))
    for chunk, alpha in ((32, 1), (32, 3), (32, 15), (32, 63), (256, 3)):
        found.append(uniform_layers(f"Lynx C {chunk}, alpha {alpha}", *[lynx(chunk, alpha)] * 2))
    found.append(uniform_layers("Lynx C 32, alpha 1, last 64, first 4", *[lynx(32, 1)] * 2, 64, 4))
    found.append(uniform_layers("Lynx C 32, alpha 1, both streams", *[lynx(32, 1, full=True)] * 2))
    found.append(uniform_layers("INT8 token", *[uniform(8, TOKEN)] * 2))
    return found


class Measured:
    """Sums over groups of contexts, from which a candidate's result follows."""

    def __init__(self) -> None:
        self.sizes: list[tuple[float, float, float, int]] = []
        self.errors = torch.zeros(2, 2, dtype=torch.float64)
        self.vnmse: list[torch.Tensor] = []
        self.accepted: list[torch.Tensor] = []

    def coarsen(self, kind: int, tensor: torch.Tensor, quantisers: Sequence[Quantiser], exact: slice) -> torch.Tensor:
        """What stage 0 leaves of keys (kind 0) or values (1), [layers, contexts, tokens, heads, dim]."""
        out = torch.empty_like(tensor)
        for layer, quantise in enumerate(quantisers):
            coarse = quantise(tensor[layer])
            out[layer] = tensor[layer]
            out[layer, :, exact] = coarse.tensor[:, exact]
            self.sizes.append((coarse.bits, coarse.total, coarse.coded, tensor[layer].numel()))
        truth = tensor.float()
        self.errors[kind] += torch.stack([(out.float() - truth).square().sum(), truth.square().sum()])
        return out

    def result(self, candidate: Candidate) -> Result:
        """All figures of it."""
        sizes = torch.tensor(self.sizes, dtype=torch.float64)
        bits, total, coded = ((sizes[:, i] * sizes[:, 3]).sum().item() / sizes[:, 3].sum().item() for i in range(3))
        exact = candidate.recent + candidate.first

        def with_exact(stage0: float, tokens: int) -> float:
            return stage0 + max(0.0, EXACT_BITS - stage0) * exact / tokens

        accepted = torch.cat(self.accepted).double()
        return Result(
            name=candidate.name,
            bits=bits,
            bits_1k=with_exact(bits, 1024),
            bits_4k=with_exact(bits, 4096),
            coded=with_exact(coded, 1024),
            total=total,
            nmse_keys=(self.errors[0, 0] / self.errors[0, 1]).item(),
            nmse_values=(self.errors[1, 0] / self.errors[1, 1]).item(),
            vnmse=torch.cat(self.vnmse).mean().item(),
            accepted=accepted.mean().item(),
            error=(accepted.std() / len(accepted) ** 0.5).item(),
            at_least_10=(accepted >= 10).double().mean().item(),
            at_least_20=(accepted >= 20).double().mean().item(),
        )


def attention_outputs(model: Model) -> torch.Tensor:
    """[layers, contexts, drafts, hidden] of the last pass."""
    return torch.stack(model.outputs)


def measure(model: Model, groups: Sequence[Group], truth: Sequence[torch.Tensor], candidate: Candidate) -> Result:
    """Drafts on the candidate's KV; truth: attention's outputs with the exact cache.

    vNMSE: Lynx, section 6.2: the error's squared norm over the output's, mean of tokens, contexts and layers.
    """
    measured = Measured()
    for group, exact in zip(groups, truth, strict=True):
        coarse = slice(candidate.first, group.keys.shape[2] - candidate.recent)
        keys = measured.coarsen(0, group.keys, candidate.keys, coarse)
        values = measured.coarsen(1, group.values, candidate.values, coarse)
        measured.accepted.append(anchor_drafts.verified(model, group, keys, values))
        error = (attention_outputs(model) - exact).square().sum(-1)
        measured.vnmse.append((error / exact.square().sum(-1)).mean((0, 2)))
    return measured.result(candidate)


def exact_outputs(model: Model, groups: Sequence[Group]) -> list[torch.Tensor]:
    """Attention's outputs with the exact cache."""
    found = []
    for group in groups:
        anchor_drafts.verified(model, group, group.keys, group.values)
        found.append(attention_outputs(model))
    return found


def check(model: Model, group: Group) -> None:
    """Drafting one by one must accept what the pass over the exact continuation accepts."""
    coarse = uniform_layers("K1 V1", planes(1), planes(1))
    keys, values = (
        Measured().coarsen(kind, tensor, coarse.keys, slice(None))
        for kind, tensor in enumerate((group.keys, group.values))
    )
    apart = anchor_drafts.drafted(model, group, keys, values) - anchor_drafts.verified(model, group, keys, values)
    if (apart != 0).float().mean() > 1 / 4:
        raise SystemExit(f"drafting and verifying accept different drafts: {apart.tolist()}; the study is wrong")


def table(results: Sequence[Result]) -> list[str]:
    """Markdown."""
    lines = [
        "| stage 0 | bits | with exact tokens: 1k / 4k | codes entropy-coded, 1k | total | NMSE K | NMSE V | vNMSE "
        "| accepted of 64 | P(≥10) | P(≥20) |",
        "|" + "---|" * 11,
    ]
    for r in results:
        coded = "" if r.coded != r.coded else f"{r.coded:.2f}"
        lines.append(
            f"| {r.name} | {r.bits:.2f} | {r.bits_1k:.2f} / {r.bits_4k:.2f} | {coded} | {r.total:.2f} "
            f"| {r.nmse_keys:.5f} | {r.nmse_values:.5f} | {r.vnmse:.5f} "
            f"| {r.accepted:.1f} ± {r.error:.1f} | {r.at_least_10:.2f} | {r.at_least_20:.2f} |"
        )
    return lines


def study(
    model: Model, seed: int | None, chosen: Sequence[Candidate], lengths: Sequence[int]
) -> tuple[list[Result], int]:
    """Every candidate's figures, and the number of contexts."""
    groups = anchor_drafts.groups(model, seed, lengths)
    check(model, groups[0])
    truth = exact_outputs(model, groups)
    results = []
    for candidate in chosen:
        results.append(measure(model, groups, truth, candidate))
        print(table(results)[-1], flush=True)
    return results, sum(len(group.tokens) for group in groups)


def lengths_of(text: str) -> tuple[int, ...]:
    """The lengths that the flag --tokens names."""
    lengths = tuple(int(part) for part in text.split(","))
    if any(length < 256 or length % 256 for length in lengths):
        raise argparse.ArgumentTypeError(f"{text} has a length that is no multiple of 256, which quantisers need")
    return lengths


def main() -> None:
    """Run the study and write it down."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.anchors", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", default="", help="candidates whose name contains this")
    parser.add_argument(
        "--tokens", type=lengths_of, default=anchor_drafts.LENGTHS, help="of contexts, multiples of 256, with commas"
    )
    parser.add_argument("--threads", type=int, default=1, help="more pay off only on a machine that does nothing else")
    parser.add_argument("--out", type=Path, default=codec_report.RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    facts = codec_report.head(torch.device("cpu"), "benchmarks.anchors")
    began = time.monotonic()
    model = Model()
    chosen = [each for each in candidates() if args.only in each.name]
    greedy, contexts = study(model, None, chosen, args.tokens)
    sampled, _ = study(model, 0, [each for each in chosen if each.name in SAMPLED], args.tokens)
    took = time.monotonic() - began
    lengths = "" if args.tokens == anchor_drafts.LENGTHS else f"-{'-'.join(map(str, args.tokens))}"
    name = f"anchors{lengths}-{datetime.now(UTC).date().isoformat()}-cpu"
    shown = " and ".join(f"{length:,}" for length in args.tokens)
    lines = [
        f"# Stage 0 of progressive delivery, {facts['date']}",
        "",
        f"{facts['hardware']}, torch {facts['torch']}, {took:.0f} s: `{facts['command']}`",
        "",
        f"Demo model, float32 arithmetic, KV in bfloat16; {contexts} contexts of {shown} tokens, of heldout.txt",
        f"and {len(anchor_drafts.UNSEEN)} files of torch, transformers and huggingface_hub. Bits are a value.",
        "K2 V1: planes of the window code, 2 bits of the keys' mantissas, 1 of the values'; levels K2 V1: those of",
        "decision 0010, 4 and 2 to an octave and more in the topmost two; coded K3 V1: that of",
        "splitzip-progressive-ans, whose exponents count with their entropy;",
        "fixed point K5 V4: bits, sign included. Totals of quantisers are estimated from the entropy of the residual;",
        "those of planes are counted. ±: standard error over contexts.",
        "",
        "## Greedy",
        "",
        *table(greedy),
        "",
        f"## Temperature {anchor_drafts.TEMPERATURE}, the same Gumbel noise on both sides",
        "",
        *table(sampled),
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{name}.md").write_text("\n".join(lines) + "\n")
    record = {"greedy": greedy, "sampled": sampled}
    tables = {kind: [dataclasses.asdict(each) for each in found] for kind, found in record.items()}
    (args.out / f"{name}.json").write_text(json.dumps(facts | {"contexts": contexts} | tables, indent=1) + "\n")


if __name__ == "__main__":
    main()
