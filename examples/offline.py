"""Generates in this process, without a server: python examples/offline.py [MODEL]."""

import sys
from pathlib import Path

from kvrail import LLM, SamplingParams

DEMO = Path(__file__).resolve().parents[1] / "models" / "kvrail-demo"


def main(model: str) -> None:
    """Answer two questions at once, then continue a text in three ways."""
    with LLM(model) as llm:
        chats = [[{"role": "user", "content": f"What is {thing}?"}] for thing in ("a pipe", "a socket")]
        for result in llm.chat(chats, SamplingParams(temperature=0, max_tokens=64)):
            print(result.outputs[0].text)
        (drawn,) = llm.generate("A socket is", SamplingParams(n=3, seed=1, max_tokens=8))
        for output in drawn.outputs:
            print(f"{drawn.prompt}{output.text}")


if __name__ == "__main__":
    main(*(sys.argv[1:] or [str(DEMO)]))
