"""What a request is sampled with where it does not say: the model's generation configuration, and the operator's."""

import logging
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from kvrail.config.settings import RouterSettings
from kvrail.errors import ConfigError
from kvrail.services.router.schema import Count, Penalty, Repetition, Share, Temperature, TopK, TopP
from kvrail.text.files import read_generation_config, resolve_folder

log = logging.getLogger("kvrail.router")

OVERRIDE = "--override-generation-config"


class Defaults(BaseModel):
    """Sampling parameters under the names of transformers' GenerationConfig; without any, those of OpenAI's API.

    max_new_tokens: of an answer whose length the client leaves open; None: all that the context has room for. It is
    no limit: who asks for more gets more.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: Share = 0.0
    repetition_penalty: Repetition = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    max_new_tokens: Count | None = None

    def output_tokens(self, room: int, least: int) -> int:
        """Tokens of an answer whose length is left open. room: what the context has for it; least: asked for."""
        return room if self.max_new_tokens is None else min(room, max(self.max_new_tokens, least))


def defaults_of(settings: RouterSettings) -> Defaults:
    """The defaults that the settings name; logged. Raises ConfigError for a value that no request could have."""
    source, override = settings.generation_config, settings.override_generation_config
    unknown = sorted(override.keys() - Defaults.model_fields.keys())
    if unknown:
        raise ConfigError(f"{OVERRIDE}: {unknown[0]!r} cannot be set; set some of {', '.join(Defaults.model_fields)}")
    folder = None if source == "none" else resolve_folder(settings.model if source == "auto" else source)
    found = {} if folder is None else read_generation_config(folder)
    # do_sample is not looked at, as with vLLM: clients that name no temperature expect sampled answers.
    values = {name: value for name, value in (found | override).items() if value is not None}
    defaults = _checked(values, dict.fromkeys(override, OVERRIDE), f"{folder}/generation_config.json")
    changed = defaults.model_dump(exclude_defaults=True)
    if changed:
        log.info("requests that do not say are sampled with %s", ", ".join(f"{k} {v:g}" for k, v in changed.items()))
    return defaults


def _checked(values: Mapping[str, Any], origins: Mapping[str, str], file: str) -> Defaults:
    """origins: where a value is from, if not from `file`."""
    try:
        return Defaults.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0])
        remedy = "correct it" if name in origins else f"set it in {OVERRIDE}, or --generation-config none"
        raise ConfigError(
            f"{origins.get(name, file)}: {name} is {first['input']!r}: {first['msg'][:1].lower()}{first['msg'][1:]}; "
            f"{remedy}"
        ) from None
