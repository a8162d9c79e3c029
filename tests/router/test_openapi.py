"""The OpenAPI document: complete, and true of what the server does."""

import asyncio
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from kvrail.text import Tokenizer
from tests.router.cluster import MODEL, Cluster, run_cluster

EXAMPLES = int(os.environ.get("KVRAIL_OPENAPI_EXAMPLES", "0"))
"""Random requests of each operation, beside those that lie at the schemas' bounds."""
CONFIG = Path(__file__).with_name("schemathesis.toml")
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
ASKED: list[tuple[str, str, dict[str, Any] | None]] = [
    ("POST", "/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2, "return_token_ids": True, "n": 2}),
    ("POST", "/v1/chat/completions", {**CHAT, "model": "other"}),
    ("POST", "/v1/chat/completions", {**CHAT, "kvrail": {"trace": True}}),
    ("POST", "/v1/completions", {"model": MODEL, "prompt": "hi", "logprobs": 2, "return_token_ids": True}),
    ("POST", "/v1/completions", {"model": MODEL}),
    ("POST", "/v1/responses", {"model": MODEL, "input": "hi", "include": ["message.output_text.logprobs"]}),
    ("POST", "/v1/responses", {"model": MODEL, "input": "hi", "max_output_tokens": 2, "metadata": {"a": "b"}}),
    ("POST", "/v1/messages", {**CHAT, "max_tokens": 3}),
    ("POST", "/v1/messages", {**CHAT, "max_tokens": 0}),
    ("POST", "/v1/messages/count_tokens", CHAT),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/{model_id}", None),
    ("POST", "/tokenize", {"prompt": "hi", "return_token_strs": True}),
    ("POST", "/detokenize", {"tokens": [40]}),
    ("GET", "/health", None),
    ("GET", "/live", None),
    ("GET", "/ready", None),
    ("GET", "/version", None),
]


async def document_of(cluster: Cluster) -> dict[str, Any]:
    return (await cluster.http.get("/openapi.json")).json()


async def test_every_answer_is_described(cluster: Cluster):
    document = await document_of(cluster)
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert "422" not in operation["responses"], (method, path)
            for status, answer in operation["responses"].items():
                assert answer["content"], (method, path, status)
                assert all(content["schema"] for content in answer["content"].values()), (method, path, status)
    schemas = document["components"]["schemas"]
    assert all(schema.get("properties") for schema in schemas.values() if schema.get("type") == "object")
    assert schemas["CompletionRequest"]["properties"]["prompt"]["anyOf"][0] == {"type": "string"}


def validate(document: dict[str, Any], method: str, path: str, answer: httpx.Response) -> None:
    content = document["paths"][path][method.lower()]["responses"][str(answer.status_code)]["content"]
    schema = {"components": document["components"], **content["application/json"]["schema"]}
    jsonschema.validate(answer.json(), schema, jsonschema.Draft202012Validator)


async def test_answers_are_as_described(cluster: Cluster):
    document = await document_of(cluster)
    for method, path, body in ASKED:
        answer = await cluster.http.request(method, path.format(model_id=MODEL), json=body)
        validate(document, method, path, answer)
    made = (await cluster.http.post("/v1/responses", json={"model": MODEL, "input": "hi"})).json()["id"]
    at = "/v1/responses/{response_id}"
    for method, path in (("GET", at), ("GET", f"{at}/input_items"), ("POST", f"{at}/cancel"), ("DELETE", at)):
        validate(document, method, path, await cluster.http.request(method, path.format(response_id=made)))


async def test_methods_that_a_path_takes(cluster: Cluster):
    for path, methods in (("/health", "GET, HEAD"), ("/v1/responses/resp_1", "DELETE, GET")):
        answer = await cluster.http.put(path)
        assert (answer.status_code, answer.headers["allow"]) == (405, methods)


@pytest.mark.skipif(shutil.which("schemathesis", path=str(Path(sys.executable).parent)) is None, reason="not installed")
async def test_generated_requests(tokenizer: Tokenizer, tmp_path: Path):
    """schemathesis finds no request whose answer the document does not describe."""
    command = [str(Path(sys.executable).with_name("schemathesis")), "--config-file", str(CONFIG), "run"]
    phases = ("coverage,fuzzing", "--max-examples", str(EXAMPLES)) if EXAMPLES else ("coverage",)
    options = ["--phases", *phases, "--seed", "1", "--no-color"]
    async with run_cluster(tokenizer) as cluster:
        process = await asyncio.create_subprocess_exec(
            *command, f"{cluster.url}/openapi.json", *options, cwd=tmp_path, stdout=asyncio.subprocess.PIPE
        )
        said = (await process.communicate())[0].decode()
    assert process.returncode == 0, said[-8000:]
    generated = int(re.findall(r"(\d+) generated", said)[0])
    assert generated >= (5000 if EXAMPLES else 1000), said[-2000:]
