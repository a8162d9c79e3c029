"""SGLang's load generator, `sglang.bench_serving`: its request functions and stream parsers.

Its module is loaded with placeholders for the parts of SGLang that want a GPU's build of PyTorch; none of them asks.
"""

import asyncio
import importlib.util
import os
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

(folder,) = importlib.util.find_spec("sglang").submodule_search_locations
for name in ("sglang", "sglang.benchmark", "sglang.srt", "sglang.srt.disaggregation", "sglang.srt.utils"):
    sys.modules[name] = ModuleType(name)
    sys.modules[name].__path__ = []
for name in (
    *("benchmark.datasets", "benchmark.datasets.mooncake", "benchmark.goodput", "benchmark.utils"),
    *("srt.disaggregation.utils", "srt.utils.network"),
):
    sys.modules[f"sglang.{name}"] = MagicMock()
sys.modules["sglang.benchmark.utils"].remove_prefix = str.removeprefix
spec = importlib.util.spec_from_file_location("serving", Path(folder) / "benchmark/serving.py")
serving = sys.modules["serving"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(serving)
PATHS = {"sglang-oai": "completions", "sglang-oai-chat": "chat/completions"}
ASKED, TOKENS = 6, 8


async def main() -> None:
    serving.set_global_args(
        Namespace(disable_stream=False, disable_ignore_eos=False, return_logprob=False, return_routed_experts=False)
    )
    for backend, path in PATHS.items():
        asked = serving.RequestFuncInput(
            prompt="What is grep?",
            api_url=f"{os.environ['BASE_URL']}/v1/{path}",
            prompt_len=4,
            output_len=TOKENS,
            model=os.environ["MODEL"],
            lora_name="",
            image_data=None,
            extra_request_body={},
        )
        ask = serving.ASYNC_REQUEST_FUNCS[backend]
        for found in await asyncio.gather(*(ask(asked) for _ in range(ASKED))):
            assert found.success and not found.error, (backend, found)
            assert (found.output_len, bool(found.generated_text)) == (TOKENS, True), (backend, found)
            assert 0 < found.ttft <= found.latency, (backend, found)


asyncio.run(main())
