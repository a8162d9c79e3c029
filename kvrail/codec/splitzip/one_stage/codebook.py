"""Which exponents have a code: for each element type a window for a layer's keys and one for its values.

A codebook is a JSON file that people can read. It is measured once on a model (SplitZip, section 3.3; `kvrail
calibrate`) and given to both ends of a transfer; without one they use the codebook that ships here.
"""

import functools
import json
import os
import re
import reprlib
from pathlib import Path
from typing import Annotated, Literal, Self, get_args

import numpy as np
import numpy.typing as npt
import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvrail.codec.base import CodecError
from kvrail.codec.splitzip.tiles.format import FORMATS

Kind = Literal["keys", "values"]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]

WINDOWS: dict[str, int] = {"bfloat16": 16, "float16": 16, "float8_e5m2": 16, "float8_e4m3fn": 8}
"""How many exponents a codebook's window has, by element type."""
MAX_FILE_BYTES = 16 << 20
"""Larger files are refused unread; a thousand layers take less than 1 MiB."""
MAX_LAYERS = 1 << 16
_DEFAULT = Path(__file__).parent / "codebooks" / "default.json"
_REMEDY = "correct the file or make it again with kvrail calibrate"


class CodebookError(CodecError):
    """A codebook cannot be read or written, or does not hold what is asked of it."""


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class TensorWindows(_Strict):
    """Windows of the keys or of the values, and how well they fit what they were measured on.

    tops: the largest exponent of the window, one for all layers or one a layer. The others are measurements, one a
    layer: coverage, the fraction of values inside the window; best_set_coverage, inside the best set of as many
    exponents, contiguous or not; entropy_bits, of the exponents, a value.
    """

    tops: tuple[int, ...]
    coverage: tuple[Share, ...]
    best_set_coverage: tuple[Share, ...]
    entropy_bits: tuple[Annotated[float, Field(ge=0, le=8, allow_inf_nan=False)], ...]


class DtypeWindows(_Strict):
    """Windows of one element type. window: exponents of each; tokens: how many the measurement took."""

    window: int
    tokens: int = Field(ge=1)
    keys: TensorWindows
    values: TensorWindows

    def of(self, kind: Kind) -> TensorWindows:
        """Windows of the keys or of the values."""
        return self.keys if kind == "keys" else self.values


class Codebook(_Strict):
    """Windows by element type, with what they were measured on.

    model, model_fingerprint: name, and LoadedModel.fingerprint; the fingerprint is "" where the codebook is for any
    model. num_layers: layers of the model measured. shared: one window holds for all layers.
    """

    format: Literal["kvrail-codebook"]
    version: Literal[1]
    model: str
    model_fingerprint: str = Field(pattern=r"^([0-9a-f]{64})?$")
    comment: str
    num_layers: int = Field(ge=1, le=MAX_LAYERS)
    shared: bool
    dtypes: dict[str, DtypeWindows] = Field(min_length=1)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for dtype, windows in self.dtypes.items():
            if dtype not in WINDOWS:
                raise ValueError(f"dtypes has {dtype!r}; an element type is one of {', '.join(WINDOWS)}")
            if windows.window != WINDOWS[dtype]:
                raise ValueError(f"dtypes.{dtype}.window is {windows.window}; it must be {WINDOWS[dtype]}")
            for kind in get_args(Kind):
                self._check_tensor(dtype, kind)
        return self

    def _check_tensor(self, dtype: str, kind: Kind) -> None:
        tensor, where = self.dtypes[dtype].of(kind), f"dtypes.{dtype}.{kind}"
        for name, numbers in tensor:
            expected = 1 if self.shared and name == "tops" else self.num_layers
            if len(numbers) != expected:
                raise ValueError(f"{where}.{name} has {len(numbers)} entries; it must have {expected}")
        largest = FORMATS[dtype].exponents - 1
        for top in tensor.tops:
            if not 0 <= top <= largest:
                raise ValueError(f"{where}.tops has {top}; an exponent is from 0 to {largest}")

    @functools.cached_property
    def id(self) -> int:
        """64 bits that are equal where every window is, whatever was measured and on what; never 0."""
        windows = {dtype: [of.window, of.keys.tops, of.values.tops] for dtype, of in self.dtypes.items()}
        canonical = json.dumps(windows, sort_keys=True, separators=(",", ":"))
        return xxhash.xxh3_64_intdigest(canonical.encode()) or 1

    def tops(self, dtype: str, kind: Kind, layers: range) -> npt.NDArray[np.int64]:
        """The largest exponent of the window of each of `layers`, int64 [len(layers)].

        Raises CodebookError where the codebook has no such element type or no such layer.
        """
        if dtype not in self.dtypes:
            raise CodebookError(
                f"the codebook of {self.model} has windows for {', '.join(self.dtypes)}, not for {dtype}; "
                "use pages of one of these, or a codebook for that type"
            )
        tops = self.dtypes[dtype].of(kind).tops
        if self.shared:
            return np.full(len(layers), tops[0], dtype=np.int64)
        if len(layers) and not (min(layers) >= 0 and max(layers) < self.num_layers):
            raise CodebookError(
                f"the codebook of {self.model} has {self.num_layers} layers, and layers {min(layers)} to {max(layers)} "
                "were asked for; use the codebook that was calibrated on this model"
            )
        return np.array([tops[layer] for layer in layers], dtype=np.int64)

    @classmethod
    def load(cls, path: Path | str) -> "Codebook":
        """Read a codebook; raises CodebookError, which names the file, the field, its value and the remedy."""
        try:
            with open(path, "rb") as file:
                content = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise CodebookError(f"codebook {path}: {error.strerror}; name a readable file") from None
        if len(content) > MAX_FILE_BYTES:
            raise CodebookError(f"codebook {path} has more than {MAX_FILE_BYTES} bytes; {_REMEDY}")
        try:
            return cls.model_validate_json(content)
        except ValidationError as error:
            raise CodebookError(f"codebook {path}: {_explain(error)}; {_REMEDY}") from None

    def save(self, path: Path | str) -> None:
        """Write the codebook as JSON, whole or not at all; raises CodebookError where the file cannot be written."""
        path = Path(path)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            try:
                unfinished.write_text(_one_list_a_line(self.model_dump_json(indent=1)) + "\n", encoding="utf-8")
                unfinished.replace(path)
            finally:
                unfinished.unlink(missing_ok=True)
        except OSError as error:
            raise CodebookError(f"codebook {path}: {error.strerror}; name a file that can be written") from None


def _one_list_a_line(text: str) -> str:
    """Indented JSON with each list of numbers on a line of its own."""
    return re.sub(r"\[\n[^\]\"]*\]", lambda found: f"[{' '.join(found[0][1:-1].split())}]", text)


def _explain(error: ValidationError) -> str:
    """Field, value and what is accepted, of the first fault."""
    first = error.errors(include_url=False)[0]
    field = ".".join(map(str, first["loc"]))
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] in ("value_error", "json_invalid", "missing"):
        return f"{field}: {message}" if field else message
    value = reprlib.repr(first["input"])
    return f"{field or 'the file'} is {value}: {message[:1].lower()}{message[1:]}"


@functools.cache
def default_codebook() -> Codebook:
    """The codebook that ships: for any model, one window for the keys of all layers and one for the values."""
    return Codebook.load(_DEFAULT)
