"""Agent frameworks against a live cluster with the model that ships: objects come back, and their classes accept them.

Run by `make test-clients`, from a virtual environment that has them.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Literal

import pytest

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
MODEL = "kvrail-demo"
PORT = 8797
QUESTION = "What is grep?"


@pytest.fixture(scope="module")
def url():
    python = os.environ.get("KVRAIL_PYTHON", sys.executable)
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch, "log")
        command = [python, "-m", "kvrail", "up", "--port", str(PORT), "--kv-memory-gib", "0.5"]
        with log.open("wb") as out:
            process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out)
        deadline = time.monotonic() + 180
        while "Ctrl-C stops the cluster" not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield f"http://127.0.0.1:{PORT}/v1"
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def classes():
    """Classes of what is asked for; every field is bounded, so that a model that knows little comes to an end."""
    from pydantic import BaseModel, Field

    short = Annotated[str, Field(max_length=12)]

    class Part(BaseModel):
        kind: Literal["flag", "file"]
        name: short

    class Command(BaseModel):
        """A command."""

        name: short
        level: Annotated[int, Field(ge=1, le=5)]
        parts: Annotated[list[Part], Field(max_length=2)]
        note: short | None

    return Command


def test_langchain(url):
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    command = classes()
    llm = ChatOpenAI(base_url=url, api_key="none", model=MODEL, temperature=1, seed=3, max_tokens=300, max_retries=0)
    for method in ("json_schema", "function_calling"):
        assert isinstance(llm.with_structured_output(command, method=method).invoke(QUESTION), command)
    brief = llm.model_copy(update={"seed": 1})  # in this mode nothing but luck keeps this model from going on
    assert isinstance(brief.with_structured_output(method="json_mode", schema=None).invoke(QUESTION), dict)

    @tool
    def weather(city: Literal["Rome", "Oslo"], days: int) -> str:
        """Tells the weather."""
        return f"Sunny in {city}."

    answer = llm.bind_tools([weather], tool_choice="any", parallel_tool_calls=False).invoke(QUESTION)
    (call,) = answer.tool_calls
    assert call["name"] == "weather" and call["args"]["city"] in ("Rome", "Oslo")
    history = [("user", QUESTION), answer, weather.invoke(call)]
    assert llm.bind_tools([weather]).invoke(history).content is not None
    chunks = list(llm.bind_tools([weather], tool_choice="weather", parallel_tool_calls=False).stream(QUESTION))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk
    assert whole.tool_calls[0]["args"]["city"] in ("Rome", "Oslo")


@pytest.mark.parametrize("mode", ["TOOLS", "JSON", "JSON_SCHEMA"])
def test_instructor(url, mode):
    import instructor
    import openai

    command = classes()
    client = instructor.from_openai(openai.OpenAI(base_url=url, api_key="none"), mode=getattr(instructor.Mode, mode))
    asked = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "seed": 5, "max_tokens": 300}
    if mode == "JSON":  # the schema is only in the prompt, which this model does not heed: an object is what it gives
        asked["extra_body"] = {"response_format": {"type": "json_object", "schema": command.model_json_schema()}}
    assert isinstance(client.chat.completions.create(response_model=command, max_retries=0, **asked), command)


def test_pydantic_ai(url):
    from pydantic_ai import Agent, NativeOutput, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    command = classes()
    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=url, api_key="none"))
    for output in (NativeOutput(command), ToolOutput(command)):
        agent = Agent(model, output_type=output, model_settings={"seed": 2, "max_tokens": 400, "temperature": 1})
        assert isinstance(agent.run_sync(QUESTION).output, command)


def test_openai(url):
    import openai

    command = classes()
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    asked = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "seed": 5, "max_tokens": 300}
    assert isinstance(
        client.chat.completions.parse(response_format=command, **asked).choices[0].message.parsed, command
    )
    tools = [openai.pydantic_function_tool(command)]
    (choice,) = client.chat.completions.parse(
        tools=tools, tool_choice="required", parallel_tool_calls=False, **asked
    ).choices
    assert isinstance(choice.message.tool_calls[0].function.parsed_arguments, command)
