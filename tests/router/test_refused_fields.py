"""Fields that docs/api.md says are refused: each is, by name, on each path. A value that asks for nothing is taken."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.router.cluster import MODEL, Cluster

DOCS = Path(__file__).parents[2] / "docs" / "api.md"
_FIELD = re.compile(r"`([a-z_.*]+)`(?: \(`([^`]*)`\))?")
VALUES: dict[str, Any] = {
    "add_special_tokens": True,
    "allowed_token_ids": [1],
    "background": True,
    "best_of": 2,
    "documents": [{"text": "x"}],
    "echo": True,
    "functions": [{}],
    "include": ["x"],
    "include_reasoning": False,
    "kv_transfer_params": {},
    "length_penalty": 2,
    "logprob_token_ids": [1],
    "max_tool_calls": 1,
    "mcp_servers": ["x"],
    "modalities": ["audio"],
    "prompt_logprobs": 0,
    "enable_response_messages": True,
    "return_mm_kwargs": False,
    "return_prompt_text": True,
    "return_token_ids": True,
    "return_token_offsets": True,
    "return_tokens_as_token_ids": True,
    "return_weight_versions": True,
    "routed_experts_prompt_start": 5,
    "spaces_between_special_tokens": False,
    "store": True,
    "stream_options.include_obfuscation": True,
    "text.verbosity": "low",
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "thinking_token_budget": 5,
    "truncate_prompt_tokens": 5,
    "truncation": "auto",
    "use_beam_search": True,
    "verbosity": "low",
    "watermarking": True,
}
"""What asks for something; of the other fields a text does."""
CHATS_ALONE = ["response_format", "structured_outputs", "n", "stop", "logprobs", "reasoning_effort", "presence_penalty"]
"""Fields of chats that /v1/messages does not have."""
HI = [{"role": "user", "content": "hi"}]
BODIES = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 5},
}


def rows(heading: str, label: str) -> Iterator[tuple[str, Any]]:
    """Fields of the rows `label` below `heading`, each with the value that asks for nothing."""
    section = DOCS.read_text(encoding="utf-8").partition(f"### {heading}\n")[2].partition("\n#")[0]
    cells = [line.split("|")[2] for line in section.splitlines() if line.startswith(f"| {label} |")]
    assert cells, (heading, label)
    for name, neutral in _FIELD.findall("".join(cells)):
        try:
            yield name.replace("*", "json"), json.loads(neutral) if neutral else None
        except ValueError:
            yield name.replace("*", "json"), neutral


def nested(name: str, value: Any) -> dict[str, Any]:
    for key in reversed(name.split(".")):
        value = {key: value}
    return value


async def test_every_field_that_the_docs_refuse_is_refused_by_name(cluster: Cluster):
    both, chats, completions, responses, messages = (
        list(rows(*where))
        for where in (
            ("Chat and completions", "refused in both"),
            ("Chat and completions", "refused in chats"),
            ("Chat and completions", "refused in completions"),
            ("Responses", "refused"),
            ("Messages", "refused"),
        )
    )
    for found in (both, chats, responses, messages):
        assert len(found) > 6
    walks = {
        "/v1/chat/completions": [*both, *chats],
        "/v1/completions": [*both, *completions],
        "/v1/responses": [*responses, *both, *(pair for pair in chats if pair[0] != "store")],
        "/v1/messages": [*messages, *both, *chats, *((name, None) for name in CHATS_ALONE)],
    }
    for path, fields in walks.items():
        for name, neutral in fields:
            body = {"model": MODEL, **BODIES[path], "stream": name == "prompt_logprobs"}
            answer = await cluster.http.post(path, json=body | nested(name, VALUES.get(name, "x")))
            assert answer.status_code == 400, (path, name, answer.text)
            error = answer.json()["error"]
            told = error["message"].partition(":")[0] if path == "/v1/messages" else error["param"]
            assert told.removesuffix(".0") == name, (path, answer.text)
            if neutral is not None:
                taken = await cluster.http.post(path, json=body | nested(name, neutral))
                assert taken.status_code == 200 or path == "/v1/messages", (path, name, taken.text)
