"""How many workers of both roles compute the prompts for all: a pure function of what was measured.

Where every worker computes prompts, all sequences wait for them by turns. Where few do, sequences share the others, and
prompts wait for each other. Which is better depends on the load: it is the shorter mean gap between two tokens, unless
the prompts are too many for those workers. A mixture, with workers that compute the prompts of others and decode beside
them, was worse than either (docs/decisions/0039-split-of-roles.md).
"""

import math
from dataclasses import dataclass, replace

MIXED = 0.7
"""Part of a prompt's time that sequences beside it wait for: a step reads the weights once for both."""
SPARE, STAYS_SPARE = 0.15, -0.05
"""Part of their time that workers for prompts have to spare for prompts to be split off, so that these wait little
however they come, and to stay so while they wait little: a closed loop asks for all that its workers can compute."""
MOST_SPARE = 0.3
"""Time to spare of k workers, at most this times sqrt(k) of one: many level out what comes at random."""
WAIT = 0.6
"""Part of the limit of the first token that prompts may wait for those workers: requests that come when others have
ended wait little even if hardly any time is to spare, and requests that come at random do not."""
LONGER, STAYS_LONGER = 1.04, 1.01
"""How many times as long the gaps of the other way are, for prompts to be split off, and to stay so."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """What is measured of the workers of one moment.

    decoding: how many workers decode; both: how many of them compute prompts too; prefill: how many only do that.
    prompts: prompts to compute, in seconds of one worker a second; recent: of the last second. wait_s: of the next
    prompt, for the workers that compute them by the last split. step_s: of a step that only decodes, beside sequence_s
    for each sequence.
    """

    decoding: int
    both: int
    prefill: int
    prompts: float
    recent: float
    sequences: int
    step_s: float
    sequence_s: float
    wait_s: float = 0.0

    def together_s(self) -> float:
        """Mean gap where every worker computes prompts."""
        share = min(0.99, MIXED * self.prompts / (self.both + self.prefill))
        return self._gap_s(self.decoding) / (1 - share)

    def apart_s(self, split: int) -> float:
        """Mean gap where `split` of the workers of both roles only compute prompts; infinite where none is left."""
        return self._gap_s(self.decoding - split) if split < self.decoding else math.inf

    def _gap_s(self, workers: int) -> float:
        return self.step_s + self.sequences / workers * self.sequence_s


def fewest(fleet: Fleet, spare: float) -> int:
    """How many workers of both roles the prompts need, with time to spare; too many where all are too few."""
    for split in range(fleet.both + 1):
        workers = split + fleet.prefill
        most = MOST_SPARE * math.sqrt(workers)
        if fleet.prompts <= workers - max(-most, min(spare * workers, most)):
            return split
    return fleet.both + fleet.decoding


def best_split(fleet: Fleet, before: int | None, ttft_s: float = math.inf, gap_s: float = math.inf) -> int | None:
    """How many workers of both roles to compute prompts on; None: on all. before: the last answer.

    ttft_s, gap_s: limits. A load that rises or falls passes through what would be split, and is not.
    """
    if before is None and _best(replace(fleet, prompts=fleet.recent), None, ttft_s, gap_s) is None:
        return None
    return _best(fleet, before, ttft_s, gap_s)


def _best(fleet: Fleet, before: int | None, ttft_s: float, gap_s: float) -> int | None:
    split, together = fewest(fleet, SPARE), fleet.together_s()
    if before is not None:
        spare = before == split + 1 and fleet.apart_s(before) * STAYS_LONGER < together
        split = before if spare or _suffice(fleet, before, split, ttft_s) else split
    apart = fleet.apart_s(split)
    if (apart > gap_s) != (together > gap_s):
        return split if together > gap_s else None
    return split if apart * (LONGER if before is None else STAYS_LONGER) < together else None


def _suffice(fleet: Fleet, before: int, split: int, ttft_s: float) -> bool:
    """Whether fewer workers than `split` stay enough: prompts wait little, and one more would make gaps longer."""
    enough = fewest(fleet, STAYS_SPARE) <= before < split and fleet.wait_s <= WAIT * ttft_s
    return enough and fleet.apart_s(before) * LONGER < fleet.apart_s(split)
