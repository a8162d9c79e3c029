"""litellm, through each API that it can speak."""

import os

import litellm

URL, MODEL = os.environ["BASE_URL"], os.environ["MODEL"]
messages = [{"role": "user", "content": "What is grep?"}]
openai = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none", "temperature": 0}

whole = litellm.completion(**openai, messages=messages, max_tokens=24)
text = whole.choices[0].message.content
assert text
stream = litellm.completion(**openai, messages=messages, max_tokens=24, stream=True)
assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text
response = litellm.responses(**openai, input="What is grep?", max_output_tokens=24)
assert response.output[0].content[0].text == text
claude = litellm.completion(
    model=f"anthropic/{MODEL}", api_base=URL, api_key="none", temperature=0, messages=messages, max_tokens=24
)
assert claude.choices[0].message.content == text
