"""OpenAI's newer API, /v1/responses: its requests as chats, its answers as items, and the responses that are kept."""
