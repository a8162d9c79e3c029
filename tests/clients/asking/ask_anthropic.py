"""Anthropic's client for Python."""

import os

import anthropic

client = anthropic.Anthropic(base_url=os.environ["BASE_URL"], api_key="none", max_retries=0)
asked = {
    "model": os.environ["MODEL"],
    "messages": [{"role": "user", "content": "What is grep?"}],
}
greedy = {"extra_body": {"temperature": 0}}

whole = client.messages.create(**asked, max_tokens=24, **greedy)
text = whole.content[0].text
assert text and whole.stop_reason in ("end_turn", "max_tokens")
with client.messages.stream(**asked, max_tokens=24, **greedy) as stream:
    assert "".join(stream.text_stream) == text
    assert stream.get_final_message().usage.output_tokens == whole.usage.output_tokens
counted = client.messages.count_tokens(**asked).input_tokens
assert counted == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
try:
    client.messages.create(**asked, max_tokens=9000)
    raise AssertionError("a request that does not fit was accepted")
except anthropic.BadRequestError as error:
    assert error.body["error"]["type"] == "invalid_request_error"
