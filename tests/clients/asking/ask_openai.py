"""OpenAI's client for Python."""

import os

import openai

MODEL, QUESTION = os.environ["MODEL"], "What is grep?"
client = openai.OpenAI(base_url=os.environ["BASE_URL"] + "/v1", api_key="none", max_retries=0)
messages = [{"role": "user", "content": QUESTION}]
asked = {"model": MODEL, "temperature": 0}

whole = client.chat.completions.create(**asked, messages=messages, max_tokens=24)
text = whole.choices[0].message.content
assert text and whole.usage.completion_tokens <= 24

stream = client.chat.completions.create(**asked, messages=messages, max_tokens=24, stream=True)
assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text

response = client.responses.create(**asked, input=QUESTION, max_output_tokens=24)
assert response.output_text == text
assert client.responses.retrieve(response.id).output_text == text
events = list(client.responses.create(**asked, input=QUESTION, max_output_tokens=24, stream=True))
assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
assert events[-1].type in ("response.completed", "response.incomplete")
follow_up = client.responses.create(**asked, input="And sed?", previous_response_id=response.id, max_output_tokens=8)
assert follow_up.usage.input_tokens > response.usage.total_tokens

begun = client.chat.completions.create(**asked, messages=messages, max_tokens=2000, stream=True)
next(begun)
begun.close()  # an abort; the server goes on
assert client.chat.completions.create(**asked, messages=messages, max_tokens=24).choices[0].message.content == text
