"""What an LLM is made with: a worker's settings, as arguments."""

import difflib
from typing import Any, Literal, Self, TypedDict

import torch
from pydantic import ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from kvrail.config.settings import WorkerSettings, explain
from kvrail.config.types import ComputeDtype, KVDtype
from kvrail.errors import ConfigError


class Options(TypedDict, total=False):
    """Arguments of LLM beside the model; docs/configuration.md has each, with its default."""

    device: str
    dtype: ComputeDtype
    kv_dtype: KVDtype
    load_format: Literal["safetensors", "dummy"]
    weights: Literal["plain", "packed", "tbe"]
    page_size: int
    kv_memory_gib: float
    num_pages: int
    max_model_len: int
    max_batch_tokens: int
    max_running: int
    prefix_cache: bool
    cuda_graphs: bool
    compile: bool
    invariant: Literal["auto", "on", "off"]


class LLMSettings(WorkerSettings):
    """Settings of an LLM in the caller's process: its arguments, and no environment."""

    table = "llm"

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments alone."""
        return (init_settings,)

    @classmethod
    def of(cls, model: str, options: Options) -> Self:
        """Settings from arguments; ConfigError names the one that is unknown or wrong."""
        for name in options.keys() - Options.__annotations__.keys():
            near = difflib.get_close_matches(name, Options.__annotations__, n=1)
            remedy = f"did you mean {near[0]}?" if near else f"known are {', '.join(Options.__annotations__)} and seed"
            raise ConfigError(f"LLM has no argument {name}; {remedy}")
        given: dict[str, Any] = {"model": model, **options}
        if given.get("device", "auto") == "auto":
            given["device"] = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            return cls(**given)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            key = str(first["loc"][0])
            raise ConfigError(explain(cls, key, key, first)) from None
