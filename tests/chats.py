"""Chats as token ids."""

from typing import Any

from kvrail.text import Tokenizer


def chat_ids(tokenizer: Tokenizer, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    """Ids of a chat's prompt, as the router makes them."""
    return tokenizer.encode(tokenizer.chat.render(messages, **options), add_special_tokens=False)
