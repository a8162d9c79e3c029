"""Parsers of server-sent events in Python: the text that each makes of a stream whose first token is late."""

import asyncio
import json
import os
import sys

import httpx
import requests
from aiohttp_sse_client2.client import EventSource
from httpx_sse import connect_sse
from sseclient import SSEClient

URL = f"{os.environ['BASE_URL']}/v1/chat/completions"
ASKED = {"model": os.environ["MODEL"], "messages": [{"role": "user", "content": "hi"}], "stream": True}


def tell(parser: str, events: list[str]) -> None:
    assert events[-1] == "[DONE]", events
    chunks = [json.loads(event) for event in events[:-1]]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    sys.stdout.write(f"read: {parser} {text}\n")


with httpx.Client(timeout=60) as client, connect_sse(client, "POST", URL, json=ASKED) as source:
    tell("httpx-sse", [event.data for event in source.iter_sse()])
with requests.post(URL, json=ASKED, stream=True, timeout=60) as answer:
    tell("sseclient-py", [event.data for event in SSEClient(answer).events()])
with requests.post(URL, json=ASKED, stream=True, timeout=60) as answer:
    tell("requests", [line.decode().removeprefix("data: ") for line in answer.iter_lines() if line])


async def aiohttp_events() -> list[str]:
    found = []
    async with EventSource(URL, option={"method": "POST"}, json=ASKED) as source:
        async for event in source:
            found.append(event.data)
            if event.data == "[DONE]":  # it would connect again
                break
    return found


tell("aiohttp-sse-client2", asyncio.run(aiohttp_events()))
