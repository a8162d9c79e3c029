"""Loads a decoder-only model from Hugging Face transformers and makes sure that paged attention runs it exactly."""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from kvrail.engine.attention.registry import NAME, register
from kvrail.engine.batch.inputs import CUDA_ROWS, StepInputs
from kvrail.engine.model.fingerprint import fingerprint_dummy, fingerprint_model
from kvrail.engine.model.header import shown
from kvrail.engine.model.loading import logged_loading
from kvrail.engine.model.onednn_linear import can_use_onednn, use_onednn
from kvrail.engine.model.probe import forward, head, inspect, verify
from kvrail.engine.model.support import context_limit, refuse_unsupported
from kvrail.engine.model.weights import LoadedWeights, Progress, WeightReader, plain_files
from kvrail.errors import ConfigError, UnsupportedModelError, reason_of
from kvrail.values.layout import DTYPE_BYTES, KVLayout

logger = logging.getLogger("kvrail.worker")

LoadFormat = Literal["safetensors", "dummy"]

_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja"]
_DUMMY_SEED = 0
_REPORTED = {"output_loading_info": True, "ignore_mismatched_sizes": True}
"""Makes transformers report which tensors are missing or have another shape: see _complete."""


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model that is ready to run paged.

    model: transformers' causal LM in evaluation mode on `device`, parameters in `dtype`; config: its configuration.
    layout: how its KV lies in pages. max_model_len: tokens, prompt and output together. fingerprint: hex digest of
    configuration and weights. layers: its decoder layers in order, each with one attention module.
    projections: names, in each layer, of linear modules that take the same input. least_rows: rows of a step on CUDA
    from which on products are batch-invariant.
    """

    model: Any
    config: Any
    layout: KVLayout
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    fingerprint: str
    device: torch.device
    dtype: torch.dtype
    layers: tuple[torch.nn.Module, ...]
    projections: tuple[tuple[str, ...], ...]
    least_rows: int = CUDA_ROWS

    def logits(self, inputs: StepInputs, out: torch.Tensor | None = None) -> torch.Tensor:
        """One packed forward pass: float32 logits [rows, vocab] on the device, in `out` if it is given."""
        return forward(self.model, inputs, out)

    def head(self, body: Any, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Logits of other rows of a pass: see `probe.head`."""
        head(self.model, body, rows, out)


@dataclass(frozen=True, slots=True)
class WeightForms:
    """How a service reads and holds weights that are not plain safetensors.

    reader: reads weights stored in another form. hold: replaces a loaded model's linear layers by layers that hold the
    same weights in another form.
    """

    reader: WeightReader | None = None
    hold: Callable[[LoadedModel], LoadedModel] | None = None


def load_model(
    model: str,
    *,
    device: str,
    dtype: str,
    kv_dtype: str,
    page_size: int,
    load_format: LoadFormat,
    max_model_len: int = 0,
    packed: WeightReader | None = None,
    progress: Progress = lambda done, total: None,
) -> LoadedModel:
    """Load `model`, a local folder or a Hub name, and probe it.

    dtype: "auto" (float32 on a CPU, bfloat16 on CUDA), "float32" or "bfloat16". kv_dtype: a key of
    kvrail.values.layout.DTYPE_BYTES. load_format "dummy" reads the configuration alone and draws random weights from a
    fixed seed on the device. max_model_len 0: the model's own limit. packed: reads folders whose weights are stored in
    its form and not as safetensors files; the fingerprint is the same for both. progress: of the weights.

    Raises ConfigError for settings that do not fit the model or the machine, UnsupportedModelError for models that
    paged attention would not run exactly.
    """
    place = _device(device)
    compute = _compute_dtype(dtype, place)
    if page_size < 1:
        raise ConfigError(f"page_size is {page_size}; choose a power of two such as 64")
    if kv_dtype not in DTYPE_BYTES:
        raise ConfigError(f"kv_dtype is {kv_dtype!r}; choose one of {', '.join(DTYPE_BYTES)}")
    folder, stored = _resolve(model, load_format, packed)
    config = _load_config(model, folder)
    limit = context_limit(config)
    if max_model_len > limit:
        raise ConfigError(f"max_model_len is {max_model_len}, but {model} has a context of {limit}; lower it")
    refuse_unsupported(config)
    register()
    disable_progress_bar()  # type: ignore[no-untyped-call]  # logs are for lines
    weights = None if stored is None else stored.load(folder, progress)
    lm = _build(folder, config, compute, place, load_format, weights, progress)
    found = inspect(lm, config)
    vocab_size = lm.get_output_embeddings().weight.shape[0]
    if can_use_onednn(lm):
        use_onednn(lm)
    layout = KVLayout(found.num_layers, found.num_kv_heads, found.key_dim, found.value_dim, page_size, kv_dtype)
    verify(lm, layout)
    if load_format == "dummy":
        digest = fingerprint_dummy(config, _DUMMY_SEED)
    else:
        digest = fingerprint_model(folder, plain_files(folder) if weights is None else weights.files)
    return LoadedModel(
        model=lm,
        config=config,
        layout=layout,
        vocab_size=vocab_size,
        max_model_len=max_model_len or limit,
        eos_token_ids=_eos_token_ids(folder, config),
        fingerprint=digest,
        device=place,
        dtype=compute,
        layers=found.layers,
        projections=found.projections,
    )


def _device(device: str) -> torch.device:
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device is {device!r}; choose cpu, cuda or cuda:N") from error
    if place.type not in ("cpu", "cuda"):
        raise ConfigError(f"device is {device!r}; choose cpu, cuda or cuda:N")
    if place.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(f"device is {device!r}, but torch sees no CUDA device; choose cpu")
        count = torch.cuda.device_count()
        if (place.index or 0) >= count:
            raise ConfigError(f"device is {device!r}, but torch sees {count} CUDA devices")
        chosen = torch.device("cuda", torch.cuda.current_device() if place.index is None else place.index)
        torch.cuda.set_device(chosen)  # Triton launches on the thread's current device, wherever the tensors are
        return chosen
    return torch.device("cpu")


def _compute_dtype(dtype: str, device: torch.device) -> torch.dtype:
    named = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype not in named:
        raise ConfigError(f"dtype is {dtype!r}; choose auto, float32 or bfloat16")
    return named[dtype]


def _resolve(model: str, load_format: LoadFormat, packed: WeightReader | None) -> tuple[Path, WeightReader | None]:
    """The model's local folder, fetched from the Hub where `model` is not one, and the reader of packed weights."""
    folder = Path(model)
    if not folder.is_dir():
        patterns = ["*.json"] if load_format == "dummy" else [*_FILES, *([packed.pattern] if packed else [])]
        logger.info("fetching %s from the Hugging Face Hub, unless it is here already", model)
        try:
            folder = Path(snapshot_download(model, allow_patterns=patterns))
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
            raise ConfigError(
                f"model {model!r} is no local folder, and the Hub did not give it: {reason_of(error)}"
            ) from error
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model {model!r} has no config.json")
    if load_format == "dummy" or any(folder.glob("*.safetensors")):
        return folder, None
    if packed is not None and any(folder.glob(packed.pattern)):
        return folder, packed
    raise UnsupportedModelError(f"model {model!r} has no safetensors files; convert them, pickles are not read")


def _load_config(model: str, folder: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, KeyError, OSError) as error:
        raise UnsupportedModelError(f"transformers does not know the configuration of {model!r}: {error}") from error


def _build(
    folder: Path,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    load_format: LoadFormat,
    weights: LoadedWeights | None,
    progress: Progress,
) -> Any:
    """The model in evaluation mode on `device`, with our attention."""
    try:
        if load_format == "dummy":
            lm = _random_model(config, dtype, device)
        elif weights is not None:
            lm = _model_of(weights, config, dtype, folder).to(device)
        else:
            auto: Any = AutoModelForCausalLM
            options = {"config": config, "use_safetensors": True, "trust_remote_code": False}
            with logged_loading(folder, progress):
                lm = _complete(auto.from_pretrained(folder, dtype=dtype, **options, **_REPORTED), folder)
            lm = lm.to(device)
        lm.set_attn_implementation(NAME)
    except SafetensorError as error:
        raise ConfigError(f"the weights in {str(folder)!r} cannot be read: {error}; fetch them again") from error
    except (ValueError, KeyError, OSError, ImportError, AttributeError) as error:
        raise UnsupportedModelError(f"transformers cannot build {config.model_type}: {error}") from error
    return lm.eval().requires_grad_(False)


def _random_model(config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Weights drawn on the device, from a fixed seed that leaves the process's generators as they were."""
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), torch.device(device):
        torch.manual_seed(_DUMMY_SEED)
        auto: Any = AutoModelForCausalLM
        return auto.from_config(config, dtype=dtype, trust_remote_code=False)


def _model_of(weights: LoadedWeights, config: Any, dtype: torch.dtype, folder: Path) -> Any:
    """The model with these weights of `folder`, converted as transformers converts files."""
    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        cls: Any = type(auto.from_config(config, trust_remote_code=False))
    found = cls.from_pretrained(None, config=config, state_dict=dict(weights.tensors), dtype=dtype, **_REPORTED)
    return _complete(found, folder)


def _complete(loaded: tuple[Any, dict[str, Any]], folder: Path) -> Any:
    """The model that transformers has loaded from `folder` with the options _REPORTED.

    Raises ConfigError where a tensor is missing or has another shape: transformers takes random values in its place.
    """
    lm, report = loaded
    for name, stored, needed in sorted(report["mismatched_keys"]):
        raise ConfigError(
            f"tensor {shown(name)} in {str(folder)!r} has shape {list(stored)}, but config.json asks for"
            f" {list(needed)}; fetch the model again"
        )
    for name in sorted(report["missing_keys"]):
        raise ConfigError(f"the weights in {str(folder)!r} have no tensor {shown(name)}; fetch the model again")
    return lm


def _eos_token_ids(folder: Path, config: Any) -> frozenset[int]:
    """End-of-sequence tokens of generation_config.json and of the configuration."""
    given: list[Any] = [config.get_text_config().eos_token_id]
    path = folder / "generation_config.json"
    if path.is_file():
        given.append(json.loads(path.read_text(encoding="utf-8")).get("eos_token_id"))
    return frozenset(int(i) for ids in given if ids is not None for i in (ids if isinstance(ids, list) else [ids]))
