"""Attention of new tokens behind others: microseconds of one layer, on a GPU.

    python -m benchmarks.attention_chunks [--heads 32,64] [--contexts 128,2048,8192,32768] [--tokens 2,16,512,8192]

One sequence, 8 KV heads of 128 in bfloat16, pages of 64 tokens; what a step of the engine launches for it, as the
engine chooses, and with two stages and programs that share nothing, which must give the same bits. Beside them one new
token, which the decode kernel computes.
"""

import argparse
import sys
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.engine_attention import captured_s
from benchmarks.facts import say
from kvrail.engine.attention.options import ScoreOptions
from kvrail.engine.attention.shares import shares_of
from kvrail.engine.attention.triton.decode_kernel import decode_attention
from kvrail.engine.attention.triton.order import HeadShape
from kvrail.engine.attention.triton.prefill_kernel import PrefillTuning, prefill_attention, tuning_for
from kvrail.engine.kv.formats import LayerPages

KV_HEADS, DIM, PAGE = 8, 128, 64
_LAUNCHES, _POOLS = 40, 4
"""Launches go over several pools in turn, so that no cache holds their pages."""


class Sequence:
    """A sequence of `context` tokens, the last of them new, with `heads` query heads."""

    def __init__(self, heads: int, context: int) -> None:
        torch.manual_seed(0)
        self.heads, self.context, self.options = heads, context, ScoreOptions(DIM**-0.5)
        self.pools = [LayerPages(*self._pages()) for _ in range(_POOLS)]
        self.table = torch.arange(-(-context // PAGE), dtype=torch.int32, device="cuda")[None]
        self.processors = torch.cuda.get_device_properties(0).multi_processor_count

    def _pages(self) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (self._draw(-(-self.context // PAGE) * PAGE, KV_HEADS) for _ in range(2))
        return keys.view(-1, PAGE, KV_HEADS, DIM), values.view(-1, PAGE, KV_HEADS, DIM)

    def _draw(self, tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, DIM, device="cuda", dtype=torch.bfloat16)

    def decode(self) -> float:
        """Microseconds of one new token."""
        query, key, value = self._draw(1, self.heads), self._draw(1, KV_HEADS), self._draw(1, KV_HEADS)
        length = torch.tensor([self.context], dtype=torch.int32, device="cuda")
        shares = torch.from_numpy(shares_of(np.array([self.context]), KV_HEADS, 4 * self.processors)).int().cuda()
        counters = torch.zeros(KV_HEADS, dtype=torch.int32, device="cuda")
        out = torch.empty_like(query)

        def launch(pool: LayerPages) -> None:
            decode_attention(query, key, value, pool, self.table, length, shares, counters, out, self.options)

        return self._microseconds(launch)

    def chunk(self, tokens: int) -> tuple[float, float]:
        """Microseconds for the new tokens, as the engine launches them, and where programs share nothing."""
        query = self._draw(tokens, self.heads)
        shape = HeadShape(DIM, DIM, 2, 2)
        chosen = tuning_for(shape, tokens, self.heads, KV_HEADS, self.processors, ahead=True)
        found = [self._chunk(query, tuning) for tuning in (chosen, PrefillTuning(64, 4, 2))]
        if not torch.equal(found[0][0].view(torch.int16), found[1][0].view(torch.int16)):
            raise SystemExit(f"{tokens} tokens of {self.context} have other bits where programs share what they see")
        return found[0][1], found[1][1]

    def _chunk(self, query: torch.Tensor, tuning: PrefillTuning) -> tuple[torch.Tensor, float]:
        tokens, most, before = len(query), tuning.queries, self.context - len(query)
        listed = [[first, min(most, tokens - first), before + first, 0] for first in range(0, tokens, most)]
        blocks = torch.tensor(listed, dtype=torch.int32, device="cuda")
        out = torch.empty_like(query)

        def launch(pool: LayerPages) -> None:
            prefill_attention(query, pool, self.table, blocks, out, self.options, self.processors, tuning)

        seconds = self._microseconds(launch)
        launch(self.pools[0])
        return out, seconds

    def _microseconds(self, launch: Callable[[LayerPages], None]) -> float:
        """Median of captured launches."""

        def run() -> None:
            for number in range(_LAUNCHES):
                launch(self.pools[number % _POOLS])

        return 1e6 * captured_s(run) / _LAUNCHES


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", default="32,64", help="numbers of query heads, with commas")
    parser.add_argument("--contexts", default="128,2048,8192,32768", help="tokens in all, the new ones included")
    parser.add_argument("--tokens", default="2,16,64,512,2048,8192", help="new tokens, with commas")
    args = parser.parse_args()
    sizes = list(map(int, args.tokens.split(",")))
    say("benchmarks.attention_chunks", "cuda")
    sys.stdout.write("us of one layer, in brackets with other launches\n\n")
    sys.stdout.write("| heads | context | one token | " + " | ".join(f"{n:,} tokens" for n in sizes) + " |\n")
    sys.stdout.write("|---" * (3 + len(sizes)) + "|\n")
    for heads in map(int, args.heads.split(",")):
        for context in map(int, args.contexts.split(",")):
            sequence = Sequence(heads, context)
            cells = ["{:.0f} ({:.0f})".format(*sequence.chunk(n)) if n <= context else "" for n in sizes]
            sys.stdout.write(f"| {heads} | {context:,} | {sequence.decode():.0f} | " + " | ".join(cells) + " |\n")


if __name__ == "__main__":
    main()
