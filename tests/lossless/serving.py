"""Requests of all kinds to one model whose pages are plain, and to the same one whose full pages are closed."""

import functools
import random
from pathlib import Path
from typing import Any

from kvrail import LLM, SamplingParams
from kvrail.config.settings import DEMO_MODEL
from kvrail.text import load_tokenizer


@functools.cache
def demo_ids() -> list[int]:
    text = (Path(DEMO_MODEL) / "heldout.txt").read_text()
    return load_tokenizer(DEMO_MODEL).encode(text * 3, add_special_tokens=False)


def requests(count: int, longest: int, most: int, seed: int = 0) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts, many of which begin alike, and how each is sampled; at most `longest` and `most` tokens."""
    rng = random.Random(seed)
    prompts, params = [], []
    for number in range(count):
        begin = rng.choice([0, 0, 0, rng.randrange(1000)])
        length = rng.choice([1, 63, 64, 65, 128, 192, rng.randrange(1, longest + 1), rng.randrange(1, longest + 1)])
        suffix = demo_ids()[2000 + 7 * number :][: rng.choice([0, 0, 1, 30, 64])]
        prompts.append([*demo_ids()[begin : begin + length], *suffix][:longest])
        params.append(
            SamplingParams(
                max_tokens=rng.randrange(2, most),
                temperature=rng.choice([0.0, 0.7, 1.0]),
                top_p=rng.choice([1.0, 0.9]),
                seed=number,
                n=rng.choice([1, 1, 1, 3]),
                presence_penalty=rng.choice([0.0, 0.0, 0.5]),
                logprobs=rng.choice([None, None, 2]),
                ignore_eos=True,
            )
        )
    return prompts, params


def answers(
    kv_cache: str, asked: tuple[list[list[int]], list[SamplingParams]], model: str = DEMO_MODEL, **options: Any
) -> tuple[list, Any]:
    """All tokens and log probabilities, and the engine, whose books are right at the end."""
    with LLM(model, kv_cache=kv_cache, kv_dtype="bfloat16", **options) as llm:
        results = llm.generate(*asked)
        found = [(list(each.token_ids), repr(each.logprobs)) for result in results for each in result.outputs]
        llm._engine.check()
        return found, llm._engine
