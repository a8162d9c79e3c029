"""Error of attention's outputs after each stage of a codec, and the drafts that a stage gets accepted.

    python -m benchmarks.attention_error [--only TEXT] [--threads 1] [--out FOLDER]

Contexts are text that the demo model has not seen (benchmarks/anchor_drafts.py). Their KV goes through the codec, page
by page as the engine has it; then the model reads the exact continuation over what each stage leaves in the pages.
vNMSE is Lynx's, section 6.2: the error's squared norm over that of the output with the coarse KV, mean of tokens,
contexts and layers. Writes NAME.md and NAME.json. Exits with an error where an exact codec does not restore every bit,
or `lynx` errs more than the paper's.
"""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import anchor_drafts
from benchmarks.anchor_drafts import Group, Model, attention_outputs, exact_outputs
from benchmarks.facts import RESULTS, facts_of, hardware, paragraph
from kvrail.codec.base import Block, Codec, PagedBlock
from kvrail.codec.integer.codec import int4, int8
from kvrail.codec.papers.lynx.codec import lynx, lynx_exact
from kvrail.codec.papers.lynx.format import LynxCode

LIMITS = (0.015, 0.0002)
"""Of vNMSE, of the anchor and of both stages: Lynx, Table 3."""


@dataclass(frozen=True)
class Candidate:
    """A codec over pages of `page_size` tokens. default: whether LIMITS hold for its first two stages."""

    name: str
    codec: Codec
    page_size: int = 64
    default: bool = False


@dataclass(frozen=True)
class Result:
    """Figures of a stage. bits: a value, of all stages so far; nmse: of the KV itself; error: of `accepted`."""

    name: str
    stage: int
    bits: float
    nmse_keys: float
    nmse_values: float
    vnmse: float
    accepted: float
    error: float


def candidates() -> list[Candidate]:
    """The codecs as they are, their lossy peers, then other parameters."""
    found = [Candidate("lynx", lynx(), default=True), Candidate("lynx-exact", lynx_exact(), default=True)]
    found += [Candidate("int8", int8()), Candidate("int4", int4())]
    for page_size, chunk, alphas in (
        (64, 64, (0.5, 1.0, 3.0, 15.0)),
        (64, 32, (0.0, 1.0)),
        (64, 16, (0.0,)),
        (256, 256, (0.0, 1.0)),
        (256, 64, (0.0, 1.0)),
        (256, 32, (0.0, 1.0, 3.0)),
    ):
        for alpha in alphas:
            name = f"lynx, page {page_size}, chunk {chunk}, alpha {alpha:g}"
            found.append(Candidate(name, lynx(LynxCode(alpha, chunk)), page_size))
    return found


def block_of(group: Group, page_size: int) -> Block:
    """The contexts' KV as pages, all of a layer's contexts one after the other."""
    tensors = []
    for tensor in (group.keys, group.values):
        layers, _, _, heads, dim = tensor.shape
        tensors.append(tensor.reshape(layers, -1, page_size, heads, dim).contiguous())
    return Block(*tensors)


def stages_of(candidate: Candidate, group: Group) -> list[tuple[Block, float]]:
    """What lies in the pages after each stage, and the bits a value that have come by then."""
    block, found, bits = block_of(group, candidate.page_size), [], 0.0
    out = Block(torch.empty_like(block.keys), torch.empty_like(block.values))
    values = block.keys.numel() + block.values.numel()
    payloads = candidate.codec.encode(PagedBlock.whole(block)).stages()
    for stage, payload in enumerate(payloads):
        candidate.codec.decode(stage, payloads[: stage + 1], PagedBlock.whole(out))
        bits += 8 * payload.nbytes / values
        found.append((Block(out.keys.clone(), out.values.clone()), bits))
    if candidate.codec.exact and not all(map(_same_bits, out.tensors(), block.tensors())):
        raise SystemExit(f"{candidate.name} does not restore every bit")
    return found


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


def measure(model: Model, groups: Sequence[Group], truth: Sequence[torch.Tensor], candidate: Candidate) -> list[Result]:
    """Figures of each stage; truth: attention's outputs with the exact cache."""
    stages = candidate.codec.num_stages
    vnmse: list[list[torch.Tensor]] = [[] for _ in range(stages)]
    accepted: list[list[torch.Tensor]] = [[] for _ in range(stages)]
    errors = torch.zeros(stages, 2, 2, dtype=torch.float64)  # of keys and values: the error's squares and the exact's
    bits = torch.zeros(stages, dtype=torch.float64)
    for group, exact in zip(groups, truth, strict=True):
        tensors = (group.keys, group.values)
        for stage, (block, size) in enumerate(stages_of(candidate, group)):
            coarse = [left.view(tensor.shape) for left, tensor in zip(block.tensors(), tensors, strict=True)]
            accepted[stage].append(anchor_drafts.verified(model, group, *coarse))
            outputs = attention_outputs(model)
            vnmse[stage].append(((outputs - exact).square().sum(-1) / exact.square().sum(-1)).mean((0, 2)))
            bits[stage] += size * group.keys.numel()
            for kind, (left, tensor) in enumerate(zip(coarse, tensors, strict=True)):
                errors[stage, kind, 0] += (left.float() - tensor.float()).square().sum()
                errors[stage, kind, 1] += tensor.float().square().sum()
    numel = sum(group.keys.numel() for group in groups)
    found = []
    for stage in range(stages):
        drafts = torch.cat(accepted[stage]).double()
        nmse = (errors[stage, :, 0] / errors[stage, :, 1]).tolist()
        error = (drafts.std() / len(drafts) ** 0.5).item()
        mean = torch.cat(vnmse[stage]).mean().item()
        size = bits[stage].item() / numel
        found.append(Result(candidate.name, stage, size, *nmse, mean, drafts.mean().item(), error))
    return found


def check(results: Sequence[Result]) -> None:
    """Exit where the default code errs more than the paper's."""
    for result, limit in zip(results, LIMITS, strict=False):
        if result.vnmse > limit:
            raise SystemExit(f"{result.name} has vNMSE {result.vnmse:.5f} after stage {result.stage}; limit {limit}")


def table(results: Sequence[Result]) -> list[str]:
    """Markdown."""
    lines = ["| codec | stage | bits so far | NMSE K | NMSE V | vNMSE | accepted of 64 |", "|" + "---|" * 7]
    for r in results:
        lines.append(
            f"| {r.name} | {r.stage} | {r.bits:.2f} | {r.nmse_keys:.2e} | {r.nmse_values:.2e} | {r.vnmse:.6f} "
            f"| {r.accepted:.1f} ± {r.error:.1f} |"
        )
    return lines


def main() -> None:
    """Measure and write it down."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention_error", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", default="", help="codecs whose name contains this")
    parser.add_argument("--threads", type=int, default=1, help="more pay off only on a machine that does nothing else")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    facts = facts_of("benchmarks.attention_error", hardware("cpu"))
    model = Model()
    groups = anchor_drafts.groups(model)
    truth = exact_outputs(model, groups)
    results: list[Result] = []
    for candidate in (each for each in candidates() if args.only in each.name):
        found = measure(model, groups, truth, candidate)
        if candidate.default:
            check(found)
        results += found
        print("\n".join(table(found)[2:]), flush=True)
    name = f"attention-error-{facts['date']}-cpu"
    lines = [
        f"# Error of attention's outputs, {facts['date']}",
        "",
        paragraph(facts),
        "Demo model, float32 arithmetic, KV in bfloat16, greedy; "
        f"{sum(len(group.tokens) for group in groups)} contexts of 768 and 1,280 tokens that it has not seen.",
        "vNMSE as in Lynx, section 6.2, over 64 tokens that follow each context. ±: standard error over contexts.",
        f"Paper, Table 3 (another model): anchor {LIMITS[0]}, both stages 0.00017.",
        "",
        *table(results),
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{name}.md").write_text("\n".join(lines) + "\n")
    record = facts | {"results": [dataclasses.asdict(each) for each in results]}
    (args.out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
