"""The router: OpenAI's HTTP API in front, decode workers behind. Never imports torch, even indirectly."""
