"""litellm on streams whose first token is late, as a client of OpenAI's API, of vLLM's and of Anthropic's."""

import os
import sys

import litellm

URL, MODEL = os.environ["BASE_URL"], os.environ["MODEL"]
for provider, base in (("openai", f"{URL}/v1"), ("hosted_vllm", f"{URL}/v1"), ("anthropic", URL)):
    stream = litellm.completion(
        model=f"{provider}/{MODEL}",
        api_base=base,
        api_key="none",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=50,
        stream=True,
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    sys.stdout.write(f"read: {provider} {text}\n")
