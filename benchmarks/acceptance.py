"""Accepted drafts to impose where weights are random: such a model's own drafts say nothing of a real one's.

They are what benchmarks/progressive.py has measured with the demo model: one count of accepted drafts a context.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvrail.codec import registry


@dataclass(frozen=True, slots=True)
class Imposed:
    """accepted: drafts to accept of each prompt in turn, by codec of several stages; empty: nothing is imposed.

    origin: in words, where the counts come from.
    """

    accepted: Mapping[str, Sequence[int]] = field(default_factory=dict)
    origin: str = ""

    def count(self, codec: str, number: int) -> int:
        """Drafts to accept of prompt `number`; 0 where none are made."""
        return self.accepted[codec][number] if codec in self.accepted else 0

    def notes(self) -> str:
        """For below a table."""
        if not self.accepted:
            return ""
        counts = "; ".join(f"{codec}: {', '.join(map(str, each))}" for codec, each in self.accepted.items())
        return (
            "Acceptance is imposed, not measured: this many drafts of each prompt were accepted, or all that were made"
            f" where these are fewer ({counts}). {self.origin} Drafts were made and verified as ever."
        )


def impose(source: str, codecs: Sequence[str], rounds: int) -> Imposed:
    """What `source` has for the codecs of several stages among `codecs`: `rounds` evenly spread quantiles.

    source: a JSON file that benchmarks.progressive has written with --drafts-tokens, or counts with commas for all
    codecs. Raises SystemExit where it is neither, or lacks a codec.
    """
    if "auto" in codecs:
        raise SystemExit("--acceptance goes by codec, and auto is none; leave it out of --codecs")
    staged = [name for name in codecs if registry.get(name).num_stages > 1]
    if re.fullmatch(r"\d+(,\d+)*", source):
        known = {name: [int(count) for count in source.split(",")] for name in staged}
        origin = f"They are those of --acceptance {source}."
    else:
        known = _read(Path(source))
        origin = f"They are quantiles of what the demo model's contexts gave ({Path(source).name})."
    for name in staged:
        if not known.get(name):
            raise SystemExit(f"--acceptance {source} has nothing of {name}; measure it with --drafts-tokens")
    return Imposed({name: quantiles(known[name], rounds) for name in staged}, origin)


def quantiles(counts: Sequence[int], number: int) -> list[int]:
    """The middles of `number` equal shares of `counts`, in ascending order."""
    ordered = sorted(counts)
    return [ordered[(2 * i + 1) * len(ordered) // (2 * number)] for i in range(number)]


def _read(path: Path) -> dict[str, list[int]]:
    try:
        found = json.loads(path.read_text())["accepted"]
        return {str(codec): [int(count) for count in counts] for codec, counts in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SystemExit(
            f"--acceptance {path} holds no counts of accepted drafts ({type(error).__name__}: {error}); name the JSON"
            " file of a run with --drafts-tokens, or give counts with commas"
        ) from None
