"""One policy for fields: what is supported works, what OpenAI or vLLM know and we do not is refused by name.

Fields that no server knows are ignored, and so are those that cannot change an answer. Fields of a request's schema are
not handled here; docs/api.md has the whole list.
"""

import logging
from collections.abc import Mapping
from typing import Any

from kvrail.services.router.errors import refuse

log = logging.getLogger("kvrail.router.fields")

_WITHOUT: tuple[Any, ...] = (None,)

BOTH: Mapping[str, tuple[Any, ...]] = {
    # vLLM's
    "data_parallel_rank": _WITHOUT,
    "ec_transfer_params": _WITHOUT,
    "kv_transfer_params": _WITHOUT,
    "length_penalty": (None, 1, 1.0),
    "logits_processors": _WITHOUT,
    "media_io_kwargs": _WITHOUT,
    "mm_payload": (None, "tensors"),
    "mm_processor_kwargs": _WITHOUT,
    "moderation": _WITHOUT,
    "repetition_detection": _WITHOUT,
    "request_id": _WITHOUT,
    "return_mm_kwargs": (None, True),
    "return_prompt_text": (None, False),
    "return_token_offsets": (None, False),
    "return_weight_versions": (None, False),
    "routed_experts_prompt_start": (None, 0),
    "spaces_between_special_tokens": (None, True),
    "thinking_token_budget": _WITHOUT,
    "truncation_side": _WITHOUT,
    "use_beam_search": (None, False),
    "vllm_xargs": _WITHOUT,
    "watermarking": (None, False),
    "guided_choice": _WITHOUT,
    "guided_decoding_backend": _WITHOUT,
    "guided_grammar": _WITHOUT,
    "guided_json": _WITHOUT,
    "guided_regex": _WITHOUT,
    "guided_whitespace_pattern": _WITHOUT,
    # llama.cpp's and SGLang's, of the same meaning
    "ebnf": _WITHOUT,
    "regex": _WITHOUT,
}
"""Fields of chats and completions that change the answer and are not supported; values with which they would not."""

CHAT: Mapping[str, tuple[Any, ...]] = {
    "add_special_tokens": (None, False),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "web_search_options": _WITHOUT,
}
"""The same, of chats alone."""

HARMLESS = frozenset(
    {
        "context_management",
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "session_id",
        "store",
        "stream_interval",
        "verbosity",
    }
)
"""Fields of OpenAI's and vLLM's that are taken without an effect on the answer; docs/api.md says why of each."""

COMPLETION: Mapping[str, tuple[Any, ...]] = {"prompt_embeds": _WITHOUT}
"""The same, of completions alone."""

TOKENIZE: Mapping[str, tuple[Any, ...]] = {"media_io_kwargs": _WITHOUT, "mm_processor_kwargs": _WITHOUT}
"""The same, of /tokenize."""


def refuse_extras(extras: Mapping[str, Any], refused: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise InvalidRequestError for the first of `refused` that asks for something; `extras`: what no schema knows."""
    for name in sorted(refused.keys() & extras.keys()):
        value = extras[name]
        if not any(
            value is neutral or (value == neutral and type(value) is type(neutral)) for neutral in refused[name]
        ):
            refuse(name, "not supported by this server; leave it out")
    if ignored := extras.keys() - refused.keys() - HARMLESS:
        log.debug("ignoring unknown fields: %s", ", ".join(sorted(ignored)))
