"""What a configuration alone says about whether paged attention can run its model exactly."""

from typing import Any

from kvrail.errors import UnsupportedModelError

_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "attention", "global", "local"})
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


def refuse_unsupported(config: Any) -> None:
    """Raise UnsupportedModelError, naming the reason, for what paged attention cannot do exactly."""
    text = config.get_text_config()
    kind = getattr(config, "model_type", type(config).__name__)
    reason = next((why for why in (_encoder(config), _layers(text), _shared_kv(text), _rope(text)) if why), None)
    if reason:
        raise UnsupportedModelError(
            f"{kind} {reason}; serve a decoder-only model with full or sliding-window attention"
        )


def _encoder(config: Any) -> str | None:
    if getattr(config, "is_encoder_decoder", False):
        return "is an encoder-decoder model"
    return None


def _layers(text: Any) -> str | None:
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or []
    strange = sorted({str(kind) for kind in kinds} - _LAYER_TYPES)
    if strange:
        return f"has layers of type {', '.join(strange)}"
    if getattr(text, "attention_chunk_size", None):
        return f"attends in chunks of {text.attention_chunk_size} tokens"
    return None


def _shared_kv(text: Any) -> str | None:
    shared = getattr(text, "num_kv_shared_layers", 0)
    return f"shares the KV of {shared} layers with others" if shared else None


def _rope(text: Any) -> str | None:
    """Some rotary embeddings take their frequencies from the longest sequence of a batch."""
    parameters = getattr(text, "rope_parameters", None) or {}
    nested = [p for p in parameters.values() if isinstance(p, dict)]
    for entry in nested or [parameters]:
        kind = entry.get("rope_type", "default")
        if kind in _LENGTH_DEPENDENT_ROPE:
            return f"has rotary embeddings of type {kind}, which change with the longest sequence of a batch"
    return None


def context_limit(config: Any) -> int:
    """The longest sequence that the configuration allows, in tokens."""
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if not limit:
        kind = getattr(config, "model_type", type(config).__name__)
        raise UnsupportedModelError(f"{kind} names no max_position_embeddings in its configuration")
    return int(limit)


def expected_window(config: Any, layer: int) -> int | None:
    """The sliding window that the configuration gives layer `layer`; 0: none; None: it does not say."""
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None) or 0
    kinds = getattr(text, "layer_types", None)
    if kinds:
        return int(window) if kinds[layer] == "sliding_attention" else 0
    if getattr(text, "use_sliding_window", True) is False:
        return 0
    return int(window) if hasattr(text, "sliding_window") else None
