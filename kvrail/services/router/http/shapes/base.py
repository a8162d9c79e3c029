"""What every shape is based on, and errors."""

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Shape(BaseModel):
    """Base: nothing but what is written here is in an answer."""

    model_config = ConfigDict(extra="forbid", strict=True)


class ErrorBody(Shape):
    """What was wrong, with which parameter, and the remedy."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(Shape):
    """OpenAI's error object."""

    error: ErrorBody


class AnthropicErrorBody(Shape):
    """What was wrong, and the remedy."""

    type: str
    message: str


class AnthropicError(Shape):
    """Anthropic's error object."""

    type: Literal["error"]
    error: AnthropicErrorBody
    request_id: str | None
