"""Anthropic's API, /v1/messages: its requests as chats, its answers as content blocks."""
