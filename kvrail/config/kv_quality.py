"""`kv_cache` as auto:BOUND: the smallest form of pages that `kvrail quality` found good enough."""

import json
import math
from pathlib import Path
from typing import Any

from kvrail.errors import ConfigError
from kvrail.values.kv_cache import LOSSY_FORMS

AUTO = "auto:"
MEASURE = "kvrail quality --kv-cache int8,int4 --json"


def form_under(value: str, path: str) -> str:
    """The form that `value`, auto:BOUND, stands for, by the figures in the file `path`.

    It is the lossy form of fewest bits whose KL, in nats a token, is at most BOUND; lossless where none is. Raises
    ValueError.
    """
    try:
        bound = float(value.removeprefix(AUTO))
    except ValueError:
        bound = math.nan
    if not 0 < bound < math.inf:
        raise ValueError("write auto:BOUND with a KL in nats a token, for example auto:0.005")
    if not path:
        raise ValueError(f"set kv_quality too, a file that {MEASURE} wrote")
    figures = measured(path)
    found = {form: figures[f"{form} pages"] for form in LOSSY_FORMS if f"{form} pages" in figures}
    if not found:
        raise ValueError(f"kv_quality: {path} has no figures of lossy pages; write it again by {MEASURE}")
    return min((form for form in found if found[form][1] <= bound), key=lambda form: found[form][0], default="lossless")


def measured(path: str) -> dict[str, tuple[float, float]]:
    """Bits a value and KL in nats a token, by the names that the file has. Raises ValueError."""
    content = _read(path)
    try:
        return {str(row["name"]): (float(row["bits"]), float(row["kl"])) for row in content["figures"]}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"kv_quality: {path} has no figures of kvrail quality --json ({error!r})") from None


def check_model(path: str, model: str, fingerprint: str) -> None:
    """Raises ConfigError unless the figures are of the model with this fingerprint."""
    try:
        measured_model = _read(path).get("model_fingerprint")
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if measured_model != fingerprint:
        raise ConfigError(f"kv_quality: {path} is of another model than {model}; write it again by {MEASURE}")


def _read(path: str) -> dict[str, Any]:
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"kv_quality: {path}: {error.strerror}; name a file of kvrail quality --json") from None
    except ValueError as error:
        raise ValueError(f"kv_quality: {path} is not JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"kv_quality: {path} has no figures of kvrail quality --json")
    return content
