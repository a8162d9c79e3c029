"""The files that describe a model's tokenizer: a local folder, or the Hub's, fetched without the weights."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from kvrail.errors import ConfigError, reason_of

PATTERNS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "config.json",
    "generation_config.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)
"""The files fetched from the Hub; patterns match whole paths."""


def resolve_folder(model: str) -> Path:
    """Return the folder with the tokenizer's files: `model` itself, or the Hub's snapshot of that name."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists() or path.is_absolute() or model.startswith((".", "~")):
        raise ConfigError(f"model {model!r} is not a folder; name a folder or a model on the Hub (owner/name)")
    try:
        return Path(snapshot_download(model, allow_patterns=list(PATTERNS)))
    except HFValidationError as error:
        raise ConfigError(
            f"model {model!r} is neither a folder nor a Hub name (owner/name); correct --model"
        ) from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"model {model!r}: the tokenizer's files cannot be fetched from the Hub ({reason_of(error)}); check the"
            " name, the access token and the network, or name a local folder"
        ) from error


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The parsed files; absent ones are empty. chat_templates: name -> jinja source."""

    folder: Path
    tokenizer: dict[str, Any]
    tokenizer_config: dict[str, Any]
    special_tokens_map: dict[str, Any]
    config: dict[str, Any]
    generation_config: dict[str, Any]
    chat_templates: dict[str, str]

    @property
    def text_config(self) -> dict[str, Any]:
        """config.json's part about the language model."""
        inner = self.config.get("text_config")
        return inner if isinstance(inner, dict) else self.config


def read_files(folder: Path) -> TokenizerFiles:
    """Parse the tokenizer's files in `folder`; ConfigError names the file that is missing or broken."""
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(
            f"{folder / 'tokenizer.json'} is missing; write it with "
            "transformers.AutoTokenizer.from_pretrained(model).save_pretrained(folder)"
        )
    tokenizer_config = _read_json(folder / "tokenizer_config.json")
    return TokenizerFiles(
        folder=folder,
        tokenizer=_read_json(folder / "tokenizer.json"),
        tokenizer_config=tokenizer_config,
        special_tokens_map=_read_json(folder / "special_tokens_map.json"),
        config=_read_json(folder / "config.json"),
        generation_config=read_generation_config(folder),
        chat_templates=_read_templates(folder, tokenizer_config.get("chat_template")),
    )


def read_generation_config(folder: Path) -> dict[str, Any]:
    """The object in `folder`'s generation_config.json; empty where there is none. Raises ConfigError."""
    return _read_json(folder / "generation_config.json")


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty where the file is absent."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON ({error}); fetch or save the model again") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no JSON object; fetch or save the model again")
    return content


def _read_templates(folder: Path, configured: object) -> dict[str, str]:
    """Chat templates by name. Files take precedence over the configuration's entry, as in transformers."""
    files = {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    if files:
        return {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    match configured:
        case None:
            return {}
        case str():
            return {"default": configured}
        case dict():
            return {str(name): str(source) for name, source in configured.items()}
        case list():
            return {str(entry["name"]): str(entry["template"]) for entry in configured}
        case _:
            raise ConfigError(
                f"{folder / 'tokenizer_config.json'}: chat_template is neither a text nor a list of named templates; "
                "write the template to chat_template.jinja"
            )
