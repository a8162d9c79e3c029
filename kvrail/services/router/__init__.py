"""The router: the HTTP APIs of OpenAI and Anthropic in front, decode workers behind. Never reaches torch."""
