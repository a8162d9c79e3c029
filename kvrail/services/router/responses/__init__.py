"""OpenAI's newer API, /v1/responses: its requests as chats, its answers as items, and those that are kept."""
