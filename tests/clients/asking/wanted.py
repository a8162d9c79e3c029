"""What clients ask for, as a class: what wanted.json describes; each field has a bound, so that a small model ends."""

import json
import os
import sys
from typing import Annotated, Literal

from pydantic import BaseModel, Field

URL, MODEL, QUESTION = os.environ["BASE_URL"] + "/v1", os.environ["MODEL"], "What is grep?"
Short = Annotated[str, Field(max_length=12)]


class Part(BaseModel):
    kind: Literal["flag", "file"]
    name: Short


class Command(BaseModel):
    """A command."""

    name: Short
    level: Annotated[int, Field(ge=1, le=5)]
    parts: Annotated[list[Part], Field(max_length=2)]
    note: Short | None


def show(command: object) -> None:
    """Have the test validate what a client made of an answer."""
    assert isinstance(command, Command), command
    sys.stdout.write(f"object: {json.dumps(command.model_dump())}\n")
