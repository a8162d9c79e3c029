"""langchain-openai, through both of OpenAI's APIs."""

import os

from langchain_openai import ChatOpenAI

asked = {
    "model": os.environ["MODEL"],
    "base_url": os.environ["BASE_URL"] + "/v1",
    "api_key": "none",
    "temperature": 0,
    "max_tokens": 24,
}
chat = ChatOpenAI(**asked)
text = chat.invoke("What is grep?").content
assert text
assert "".join(chunk.content for chunk in chat.stream("What is grep?")) == text
responses = ChatOpenAI(**asked, use_responses_api=True)
assert responses.invoke("What is grep?").content[0]["text"] == text
