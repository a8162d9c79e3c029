"""Each field that OpenAI's, Anthropic's and vLLM's requests have: supported, refused by name, or told harmless."""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_create_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from pydantic import BaseModel

from kvrail.services.router.messages import translate as messages
from kvrail.services.router.messages.schema import MessagesRequest, Prompted
from kvrail.services.router.plan import fields
from kvrail.services.router.responses import translate as responses
from kvrail.services.router.responses.schema import ResponsesRequest
from kvrail.services.router.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from tests.router.cluster import MODEL, Cluster

API = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
VLLM = json.loads(Path(__file__).with_name("vllm_fields.json").read_text())
"""Of the release that it names. A newer one's are read off the classes that it names."""
CHAT = {**fields.BOTH, **fields.CHAT}
COMPLETION = {**fields.BOTH, **fields.COMPLETION}
MESSAGES = {*messages.HARMLESS, *messages.PASSED}
APIS: list[tuple[str, Iterable[str], type[BaseModel], Collection[str], Collection[str]]] = [
    ("chat", chat_create_params.CompletionCreateParamsBase.__annotations__, ChatRequest, CHAT, fields.HARMLESS),
    ("vllm chat", VLLM["chat"]["fields"], ChatRequest, CHAT, fields.HARMLESS),
    (
        "completion",
        completion_create_params.CompletionCreateParamsBase.__annotations__,
        CompletionRequest,
        (),
        frozenset(),
    ),
    ("vllm completion", VLLM["completion"]["fields"], CompletionRequest, COMPLETION, fields.HARMLESS),
    (
        "responses",
        response_create_params.ResponseCreateParamsBase.__annotations__,
        ResponsesRequest,
        {**CHAT, **responses.REFUSED},
        fields.HARMLESS,
    ),
    (
        "vllm responses",
        VLLM["responses"]["fields"],
        ResponsesRequest,
        {**CHAT, **responses.REFUSED},
        fields.HARMLESS,
    ),
    ("vllm messages", VLLM["messages"]["fields"], MessagesRequest, messages.REFUSED, MESSAGES),
    ("vllm count", VLLM["count"]["fields"], Prompted, messages.REFUSED, MESSAGES),
    ("vllm tokenize", VLLM["tokenize"]["fields"], TokenizeRequest, fields.TOKENIZE, ()),
    ("vllm detokenize", VLLM["detokenize"]["fields"], DetokenizeRequest, (), ()),
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
    ("names", "schema", "refused", "taken"), [row[1:] for row in APIS], ids=[row[0] for row in APIS]
)
def test_each_field_is_decided(
    names: Iterable[str], schema: type[BaseModel], refused: Collection[str], taken: Collection[str]
):
    told = set(re.findall(r"`([a-z_]+)[`.]", API))
    for name in names:
        assert name in schema.model_fields or (name in refused) != (name in taken), name
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
