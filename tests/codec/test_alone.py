"""kvrail.codec beside the packages that its README names, and nothing else."""

import json
import os
import re
import subprocess
import sys
from importlib.metadata import packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

README = (Path(__file__).parents[2] / "kvrail" / "codec" / "README.md").read_text()

CODE = """
import importlib.abc, json, sys
refused = set(json.loads(sys.argv[1]))

class Refusing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        ours = name.split(".")[:2]
        if ours[0] in refused or (ours[0] == "kvrail" and ours[1:] not in ([], ["codec"])):
            raise ModuleNotFoundError(f"{name} is not here", name=name)

sys.meta_path.insert(0, Refusing())
exec(sys.argv[2])

from kvrail.codec.base import Block, PagedBlock

keys, values = (torch.randn(2, 2, 16, 2, 64).bfloat16() for _ in range(2))
pages = PagedBlock.whole(Block(keys, values))
done = []
for name in codec.names():
    one = codec.get(name)
    payloads = one.encode(pages).stages()
    out = PagedBlock.whole(Block(torch.zeros_like(keys), torch.zeros_like(values)))
    for stage in range(one.num_stages):
        one.decode(stage, payloads[: stage + 1], out)
    same = torch.equal(out.pools.keys, keys) and torch.equal(out.pools.values, values)
    assert same or not one.exact, name
    done.append(name)
print(json.dumps([done, sorted({name.split(".")[0] for name in sys.modules})]))
"""


def needed(names):
    """Distributions that these need, themselves among them."""
    found, left = set(), [canonicalize_name(name) for name in names]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            for asked in map(Requirement, requires(name) or []):
                if asked.marker is None or asked.marker.evaluate({"extra": ""}):
                    left.append(canonicalize_name(asked.name))
    return found


def test_it_works_beside_what_its_readme_names():
    (listed,) = re.findall(r"^Tensors .* It needs (.*), and nothing else of kvrail\.$", README, re.MULTILINE)
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    allowed = needed(re.split(r", | and ", listed))
    here = {module: {canonicalize_name(name) for name in names} for module, names in packages_distributions().items()}
    refused = [module for module, names in here.items() if not names & allowed and module != "kvrail"]
    assert {"transformers", "grpc", "fastapi"} <= set(refused)
    told = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(refused), example],
        capture_output=True,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert told.returncode == 0, told.stderr
    codecs, modules = json.loads(told.stdout.splitlines()[-1])
    assert len(codecs) > 8 and not set(modules) & set(refused)
