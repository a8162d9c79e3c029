"""Each field that OpenAI's, Anthropic's and vLLM's requests have: supported, refused by name, or told harmless."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_create_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from kvrail.services.router.messages import translate as messages
from kvrail.services.router.messages.schema import MessagesRequest, Prompted
from kvrail.services.router.plan import fields
from kvrail.services.router.responses import translate as responses
from kvrail.services.router.responses.schema import ResponsesRequest
from kvrail.services.router.schema import ChatRequest, CompletionRequest, OpenBody
from tests.router.cluster import MODEL, Cluster

API = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
VLLM = (
    "allowed_token_ids bad_words cache_salt data_parallel_rank ignore_eos include_stop_str_in_output "
    "kv_transfer_params length_penalty logits_processors min_p min_tokens priority prompt_logprobs "
    "logprob_token_ids repetition_detection repetition_penalty request_id return_prompt_text return_token_ids "
    "return_token_offsets return_tokens_as_token_ids skip_special_tokens "
    "spaces_between_special_tokens stop_token_ids structured_outputs thinking_token_budget top_k "
    "truncate_prompt_tokens truncation_side use_beam_search vllm_xargs"
)
VLLM_CHAT = (
    "add_generation_prompt chat_template chat_template_kwargs continue_final_message documents echo include_reasoning "
    "mm_processor_kwargs"
)
VLLM_COMPLETION = "add_special_tokens prompt_embeds"
CHAT = {**fields.BOTH, **fields.CHAT}
COMPLETION = {**fields.BOTH, **fields.COMPLETION}
APIS: list[tuple[str, Iterable[str], type[OpenBody], Iterable[str], frozenset[str]]] = [
    ("chat", chat_create_params.CompletionCreateParamsBase.__annotations__, ChatRequest, CHAT, fields.HARMLESS),
    ("vllm chat", f"{VLLM} {VLLM_CHAT}".split(), ChatRequest, CHAT, frozenset()),
    (
        "completion",
        completion_create_params.CompletionCreateParamsBase.__annotations__,
        CompletionRequest,
        (),
        frozenset(),
    ),
    ("vllm completion", f"{VLLM} {VLLM_COMPLETION}".split(), CompletionRequest, COMPLETION, frozenset()),
    (
        "responses",
        response_create_params.ResponseCreateParamsBase.__annotations__,
        ResponsesRequest,
        {**CHAT, **responses.REFUSED},
        fields.HARMLESS,
    ),
    (
        "messages",
        message_create_params.MessageCreateParamsBase.__annotations__,
        MessagesRequest,
        messages.REFUSED,
        messages.HARMLESS,
    ),
    (
        "beta messages",
        beta_create_params.MessageCreateParamsBase.__annotations__,
        MessagesRequest,
        messages.REFUSED,
        messages.HARMLESS,
    ),
    (
        "count",
        message_count_tokens_params.MessageCountTokensParams.__annotations__,
        Prompted,
        messages.REFUSED,
        messages.HARMLESS,
    ),
]


@pytest.mark.parametrize(
    ("names", "schema", "refused", "harmless"), [row[1:] for row in APIS], ids=[row[0] for row in APIS]
)
def test_each_field_is_decided(
    names: Iterable[str], schema: type[OpenBody], refused: Iterable[str], harmless: frozenset[str]
):
    told = set(re.findall(r"`([a-z_]+)[`.]", API))
    for name in names:
        assert name in schema.model_fields or (name in refused) != (name in harmless), name
        assert name in told, f"docs/api.md does not tell of {name}"


async def test_what_is_listed_as_refused_is_refused(cluster: Cluster):
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    bodies: list[tuple[str, Mapping[str, Any], Iterable[str]]] = [
        ("/v1/chat/completions", chat, CHAT),
        ("/v1/completions", {"prompt": "hi"}, COMPLETION),
        ("/v1/responses", {"input": "hi"}, {**CHAT, **responses.REFUSED}),
        ("/v1/messages", {**chat, "max_tokens": 5}, messages.REFUSED),
    ]
    for path, body, names in bodies:
        for name in names:
            answer = await cluster.http.post(path, json={"model": MODEL, **body, name: {"asked": 1}})
            assert answer.status_code == 400, (path, name, answer.text)
            assert answer.json()["error"]["message"].startswith(f"{name}:"), (path, name, answer.text)
    assert cluster.decode[0].requests == []
