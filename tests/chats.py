"""Chats as token ids."""

from typing import Any

from kvrail.text import Tokenizer


def chat_ids(
    tokenizer: Tokenizer, messages: list[dict[str, Any]], chat_template: str | None = None, **options: Any
) -> list[int]:
    """Ids of a chat's prompt, as the router makes them."""
    chat = tokenizer.chat if chat_template is None else tokenizer.chat.replaced(chat_template)
    return tokenizer.encode(chat.render(messages, **options), add_special_tokens=False)
