"""Outputs of the model that ships, at temperature 1, under schemas of all kinds: valid, or cut by their length."""

import json
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from tests.e2e.cluster import MODEL, started
from tests.e2e.schemas import hundred

OUTPUTS = int(os.environ.get("KVRAIL_SCHEMA_OUTPUTS", "40"))
MESSAGES = [{"role": "user", "content": "What is grep?"}]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with started(tmp_path_factory) as cluster:
        yield cluster


def test_outputs_are_valid_or_cut(cluster):
    schemas = hundred()
    for each in schemas:
        jsonschema.Draft202012Validator.check_schema(each)
    chosen = schemas[:: max(1, len(schemas) // OUTPUTS)]

    def ask(number: int) -> str:
        schema = chosen[number % len(chosen)]
        described = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
        answer = cluster.client.chat.completions.create(
            model=MODEL, messages=MESSAGES, temperature=1, seed=number, max_tokens=256, response_format=described
        )
        (choice,) = answer.choices
        if choice.finish_reason == "stop":
            jsonschema.Draft202012Validator(schema).validate(json.loads(choice.message.content))
        return choice.finish_reason

    with ThreadPoolExecutor(16) as pool:
        reasons = Counter(pool.map(ask, range(OUTPUTS)))
    assert set(reasons) <= {"stop", "length"} and reasons["stop"] > OUTPUTS // 2, reasons


class Command(BaseModel):
    name: Annotated[str, Field(max_length=12)]
    level: Annotated[int, Field(ge=1, le=5)]
    also: Annotated[list[Literal["awk", "sed"]], Field(max_length=2)]
    note: Literal["old", "new"] | None


def test_parse_and_tools_with_the_official_client(cluster):
    asked = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 300}
    parsed = cluster.client.chat.completions.parse(response_format=Command, **asked).choices[0].message.parsed
    assert isinstance(parsed, Command)
    tools = [openai.pydantic_function_tool(Command)]
    forced = {**asked, "tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    (choice,) = cluster.client.chat.completions.parse(**forced).choices
    assert choice.finish_reason == "tool_calls"
    assert isinstance(choice.message.tool_calls[0].function.parsed_arguments, Command)
    with cluster.client.chat.completions.stream(**forced) as stream:
        names = {event.name for event in stream if event.type == "tool_calls.function.arguments.delta"}
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
    assert names == {"Command"} and streamed.function.arguments == choice.message.tool_calls[0].function.arguments
    call = choice.message.model_dump(include={"role", "content", "tool_calls"})
    history = [*MESSAGES, call, {"role": "tool", "tool_call_id": streamed.id, "content": "grep prints lines."}]
    answer = cluster.client.chat.completions.create(**{**asked, "messages": history})
    assert answer.choices[0].finish_reason in ("stop", "length")
