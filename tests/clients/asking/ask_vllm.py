"""vLLM's load generator, `vllm bench serve`: its request functions and stream parser, for each kind that it has.

The file is loaded by itself: the rest of vLLM wants a GPU's build of PyTorch.
"""

import asyncio
import importlib.util
import os
from pathlib import Path

import aiohttp

(folder,) = importlib.util.find_spec("vllm").submodule_search_locations
spec = importlib.util.spec_from_file_location("requests", Path(folder) / "benchmarks/lib/endpoint_request_func.py")
functions = importlib.util.module_from_spec(spec)
spec.loader.exec_module(functions)
PATHS = {"openai": "completions", "openai-chat": "chat/completions", "openai-responses": "responses"}
ASKED, TOKENS = 6, 8


async def main() -> None:
    async with aiohttp.ClientSession() as session:
        for backend, path in PATHS.items():
            asked = functions.RequestFuncInput(
                prompt="What is grep?",
                api_url=f"{os.environ['BASE_URL']}/v1/{path}",
                prompt_len=4,
                output_len=TOKENS,
                model=os.environ["MODEL"],
                ignore_eos=True,
            )
            ask = functions.ASYNC_REQUEST_FUNCS[backend]
            for found in await asyncio.gather(*(ask(asked, session) for _ in range(ASKED))):
                assert found.success and not found.error, (backend, found)
                assert (found.output_tokens, bool(found.generated_text)) == (TOKENS, True), (backend, found)
                assert 0 < found.ttft <= found.latency, (backend, found)
                assert 0 < len(found.itl) < TOKENS, (backend, found)


asyncio.run(main())
