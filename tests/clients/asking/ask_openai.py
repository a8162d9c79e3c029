"""OpenAI's client for Python."""

import openai
from wanted import MODEL, QUESTION, URL, Command, show

client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0)
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

chat = {"model": MODEL, "seed": 5, "messages": messages, "max_tokens": 300}
show(client.chat.completions.parse(**chat, response_format=Command).choices[0].message.parsed)
tools = [openai.pydantic_function_tool(Command)]
forced = {"tool_choice": "required", "parallel_tool_calls": False}
(choice,) = client.chat.completions.parse(**chat, **forced, tools=tools).choices
show(choice.message.tool_calls[0].function.parsed_arguments)
with client.chat.completions.stream(**chat, **forced, tools=tools) as stream:
    (choice,) = stream.get_final_completion().choices
show(choice.message.tool_calls[0].function.parsed_arguments)
asked = {"model": MODEL, "extra_body": {"seed": 5}, "input": QUESTION, "max_output_tokens": 300}
show(client.responses.parse(**asked, text_format=Command).output_parsed)
tools = [openai.pydantic_function_tool(Command)["function"] | {"type": "function"}]
called = client.responses.create(**asked, **forced, tools=tools)
show(Command.model_validate_json(called.output[0].arguments))

scored = client.completions.create(
    model=MODEL, prompt=["ls -l", "cat a b"], echo=True, logprobs=1, max_tokens=0, temperature=0
)
assert [choice.text for choice in scored.choices] == ["ls -l", "cat a b"]
assert all(choice.logprobs.token_logprobs[0] is None for choice in scored.choices)
