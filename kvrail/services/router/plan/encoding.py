"""Texts and chats to token ids and back, beside the event loop and in turns of clients."""

import ctypes
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from kvrail.errors import ContextLengthError
from kvrail.runtime.turns import Turns
from kvrail.services.router.errors import refuse
from kvrail.services.router.plan.fields import TOKENIZE, refuse_extras
from kvrail.services.router.plan.tools.history import shown_by
from kvrail.services.router.plan.tools.offered import functions_of
from kvrail.services.router.schema import MAX_TOKEN_IDS, ChatRequest, CompletionRequest, Message, TokenizeRequest
from kvrail.text import Tokenizer

T = TypeVar("T")

TEMPLATE_ARGUMENTS = frozenset(
    {"self", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message"}
)
"""Names in chat_template_kwargs that would shadow what the server passes itself."""
NO_THINKING: Mapping[str, Any] = {"enable_thinking": False, "thinking": False}
"""What switches the reasoning of chat templates off: Qwen's and GLM's name, DeepSeek's and Granite's."""
LONG_CHARS = 100_000
"""Texts of one request that are long: they are encoded one at a time, beside the short ones."""
SHORT_AT_ONCE = 4
SHORT_COST = 1000
"""Cost of a turn, in characters, added to that of its text."""
MAX_COUNTED_CHARS = 1 << 21
"""Longest text that is only counted (/tokenize, /v1/messages/count_tokens). It takes a second to encode."""
JSON_PIECE = 4096


_trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)
"""Gives freed memory back: a text of 8 MB takes more than a gigabyte while it is encoded. Where glibc is."""


class Encoder:
    """Encodes the texts of requests; clients take turns. Texts that are clearly too long are refused unread."""

    def __init__(self, tokenizer: Tokenizer, *, trust_templates: bool = False) -> None:
        """trust_templates: whether requests may bring a chat template."""
        self._tokenizer = tokenizer
        self._trust_templates = trust_templates
        self._short, self._long = Turns(SHORT_AT_ONCE), Turns()

    async def chat(
        self,
        request: ChatRequest | TokenizeRequest,
        client: str,
        most: int = MAX_TOKEN_IDS,
        most_chars: int | None = None,
        tools: Sequence[dict[str, Any]] = (),
        keep: int | None = None,
    ) -> list[int]:
        """At most `most` token ids of a chat that offers `tools`; InvalidRequestError names the parameter.

        client: the name of the client. most_chars: of the text that the chat template makes; None: as many as `most`
        tokens can have. keep: how many of the last ids are kept where the chat is longer than `most`; None: such a chat
        is refused.
        """
        if keep is not None:
            return _last(await self.chat(request, client, most_chars=MAX_COUNTED_CHARS, tools=tools), keep)
        template = request.chat_template
        if template is not None and not self._trust_templates:
            refuse("chat_template", "this server takes none (--trust-request-chat-template); leave it out")
        source = self._tokenizer.chat.source if template is None else template
        documents = _documents(request, source)
        arguments = _template_arguments(request.chat_template_kwargs)
        effort = request.reasoning_effort if isinstance(request, ChatRequest) else None
        if effort is not None:
            off = NO_THINKING if effort == "none" else {}
            arguments = {"reasoning_effort": effort, **off, **arguments}
        continued = bool(request.continue_final_message)
        opened = request.add_generation_prompt

        def render() -> str | list[int]:
            messages, shown = shown_by(source, _plain(request.messages or []), tools)
            chat = self._tokenizer.chat
            text = (chat if template is None else chat.replaced(template)).render(
                messages,
                shown,
                add_generation_prompt=not continued if opened is None else opened,
                continue_final_message=continued,
                documents=documents,
                **arguments,
            )
            self._refuse_longer(text, most, most_chars)
            return text if len(text) > LONG_CHARS else self._tokenizer.encode(text, False, most)

        found = await self._run(client, render, "messages", 0)
        if isinstance(found, list):
            return found
        text = found
        return await self._run(client, lambda: self._tokenizer.encode(text, False, most), "messages", len(text))

    async def prompts(
        self, request: CompletionRequest, client: str, most: int = MAX_TOKEN_IDS, keep: int | None = None
    ) -> tuple[list[list[int]], list[str]]:
        """At most `most` token ids of each prompt, and the text that `echo` puts before its output.

        keep: how many of the last ids are kept where a prompt is longer than `most`; None: such a prompt is refused.
        """
        most, most_chars = (most, None) if keep is None else (MAX_TOKEN_IDS, MAX_COUNTED_CHARS)
        special = request.add_special_tokens is not False

        def encode(prompt: str | list[int]) -> tuple[list[int], str]:
            if isinstance(prompt, str):
                return self._tokenizer.encode(prompt, special, most), prompt if request.echo else ""
            return prompt, self._tokenizer.decode(prompt, skip_special_tokens=False) if request.echo else ""

        with _about("prompt"):
            for prompt in request.prompt:
                if isinstance(prompt, str):
                    self._refuse_longer(prompt, most, most_chars)
        pairs = await self._run(
            client, lambda: list(map(encode, request.prompt)), "prompt", sum(map(len, request.prompt))
        )
        return [_last(ids, keep) for ids, _ in pairs], [text for _, text in pairs]

    async def tokenize(self, request: TokenizeRequest, client: str) -> list[int]:
        """Token ids of what /tokenize was sent."""
        refuse_extras(request.model_extra or {}, TOKENIZE)
        prompt = request.prompt
        if (prompt is None) == (request.messages is None):
            refuse("prompt", "send either prompt or messages")
        tools = request.tools or []
        if prompt is None:
            functions_of(tools)
            return await self.chat(request, client, most_chars=MAX_COUNTED_CHARS, tools=tools)
        if tools:
            refuse("tools", "only with messages; leave it out")
        with _about("prompt"):
            self._refuse_longer(prompt, MAX_TOKEN_IDS, MAX_COUNTED_CHARS)
        special = request.add_special_tokens is not False
        return await self._run(
            client, lambda: self._tokenizer.encode(prompt, special, MAX_TOKEN_IDS), "prompt", len(prompt)
        )

    async def detokenize(self, token_ids: Sequence[int], client: str) -> str:
        """Text of token ids."""

        def decode() -> str:
            largest, size = max(token_ids, default=0), self._tokenizer.vocab_size
            if largest >= size:
                refuse("tokens", f"token id {largest} is not in the vocabulary of {size}")
            return self._tokenizer.decode(token_ids, skip_special_tokens=False)

        return await self._run(client, decode, "tokens", len(token_ids))

    async def listed(self, token_ids: Sequence[int], client: str, *, texts: bool) -> dict[str, bytes]:
        """JSON of a list of token ids, and of the tokens as the vocabulary has them where `texts` says so."""

        def write() -> dict[str, bytes]:
            found = {"tokens": _json_list(token_ids, int)}
            if texts:
                found["token_strs"] = _json_list(token_ids, self._tokenizer.token)
            return found

        return await self._run(client, write, "tokens", len(token_ids))

    def special_stops(self, stop: Sequence[str]) -> dict[int, str]:
        """The stop strings that are special tokens, by token id: these are skipped in text, so no text would match."""
        found = {self._tokenizer.special_id(text): text for text in stop}
        return {token_id: text for token_id, text in found.items() if token_id is not None}

    def _refuse_longer(self, text: str, most: int, most_chars: int | None) -> None:
        """Raise ContextLengthError where a text is too long to be encoded."""
        if most_chars is not None and len(text) > most_chars:
            raise ContextLengthError(
                f"has {len(text)} characters, and at most {most_chars} are encoded to be counted; send it in parts"
            )
        self._tokenizer.refuse_longer(text, most)

    async def _run(self, client: str, work: Callable[[], T], param: str, size: int) -> T:
        """Do `work` in a thread, when it is the client's turn; `param` is what it encodes, `size` its length."""

        def long_work() -> T:
            try:
                return work()
            finally:
                _trim(0)

        with _about(param):
            if size <= LONG_CHARS:
                return await self._short.run(client, work, cost=size + SHORT_COST)
            return await self._long.run(client, long_work, cost=size)


def _documents(request: ChatRequest | TokenizeRequest, template: str) -> Sequence[Mapping[str, Any]] | None:
    """The documents of a chat; InvalidRequestError where the chat template shows none."""
    documents = request.documents if isinstance(request, ChatRequest) else None
    if documents and "documents" not in template:
        refuse("documents", "the chat template shows none; send their text in a message")
    return documents or None


def _last(token_ids: list[int], keep: int | None) -> list[int]:
    """The last `keep` of the ids; None: all of them."""
    return token_ids if keep is None else token_ids[max(0, len(token_ids) - keep) :]


@contextmanager
def _about(param: str) -> Iterator[None]:
    """Name the parameter that is too long."""
    try:
        yield
    except ContextLengthError as error:
        raise ContextLengthError(f"{param}: {error}", param=param) from None


def _json_list(items: Sequence[int], of: Callable[[int], object]) -> bytes:
    """JSON of `of` each item, in pieces: other threads run between them."""
    pieces = (items[i : i + JSON_PIECE] for i in range(0, len(items), JSON_PIECE))
    return b"[" + b",".join(json.dumps([of(item) for item in piece])[1:-1].encode() for piece in pieces) + b"]"


def _plain(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages for the chat template; raises InvalidRequestError for one without text, calls or reasoning."""
    for i, message in enumerate(messages):
        if message.tool_calls and message.role != "assistant":
            refuse(f"messages.{i}.tool_calls", "only the assistant calls tools; leave it out")
        silent = message.role == "assistant" and "content" in message.model_fields_set  # a null is said
        if message.content is None and not message.tool_calls and not message.thoughts and not silent:
            refuse(f"messages.{i}.content", "field required; send the message's text")
    return [message.plain() for message in messages]


def _template_arguments(kwargs: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Checked chat_template_kwargs."""
    for name in sorted(TEMPLATE_ARGUMENTS & (kwargs or {}).keys()):
        refuse("chat_template_kwargs", f"{name} is not taken here; send it as a field of the request, if at all")
    return kwargs or {}
