"""The arguments of LLM: settings of a worker."""

import difflib
from typing import Any, Literal, Self, TypedDict

import torch
from pydantic import ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from kvrail.config.memory import check_page_memory
from kvrail.config.origins import explain
from kvrail.config.settings import WorkerSettings
from kvrail.config.types import ComputeDtype, KVDtype, LoadFormat, Weights
from kvrail.errors import ConfigError
from kvrail.worker.budgets import MOST_PLACES

WAITING_FACTOR = 4
"""Requests that the engine holds, for each sequence that it runs at once; further prompts wait outside of it."""


class Options(TypedDict, total=False):
    """Arguments of LLM beside model and seed; docs/configuration.md lists them with their defaults."""

    device: str
    dtype: ComputeDtype
    kv_dtype: KVDtype
    kv_cache: str
    kv_quality: str
    load_format: LoadFormat
    weights: Weights
    page_size: int
    kv_memory_gib: float
    max_model_len: int
    max_batch_tokens: int
    max_running: int
    prefix_cache: bool
    eager: bool
    invariant: Literal["auto", "on", "off"]


class LLMSettings(WorkerSettings):
    """Settings of an LLM. They come from its arguments alone, not from the environment."""

    table = "llm"
    roles = ()

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The constructor's arguments."""
        return (init_settings,)

    @classmethod
    def of(cls, model: str, options: Options) -> Self:
        """Settings from arguments; ConfigError names an unknown or wrong one."""
        for name in options.keys() - Options.__annotations__.keys():
            near = difflib.get_close_matches(name, Options.__annotations__, n=1)
            remedy = f"did you mean {near[0]}?" if near else f"known are {', '.join(Options.__annotations__)} and seed"
            raise ConfigError(f"LLM has no argument {name}; {remedy}")
        given: dict[str, Any] = {"model": model, **options}
        if given.get("device", "auto") == "auto":
            given["device"] = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            settings = cls(**given)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            key = str(first["loc"][0])
            raise ConfigError(explain(cls.table, cls.model_fields, key, key, first)) from None
        check_page_memory(settings, "kv_memory_gib")
        return settings.model_copy(update={"max_waiting": WAITING_FACTOR * (settings.max_running or MOST_PLACES)})
