"""langchain-openai on a stream whose first token is late."""

import os
import sys

from langchain_openai import ChatOpenAI

chat = ChatOpenAI(model=os.environ["MODEL"], base_url=f"{os.environ['BASE_URL']}/v1", api_key="none", max_retries=0)
text = "".join(chunk.content for chunk in chat.stream("hi"))
sys.stdout.write(f"read: langchain {text}\n")
