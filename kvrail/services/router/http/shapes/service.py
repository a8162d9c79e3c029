"""The model, its tokens, and the server itself."""

from typing import Any, Literal

from kvrail.services.router.http.shapes.base import Shape


class Card(Shape):
    """A name of the served model; max_model_len: tokens, null while no worker takes requests."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None


class Cards(Shape):
    """All names of the served model."""

    object: Literal["list"]
    data: list[Card]


class Tokenized(Shape):
    """Tokens of a text or a chat; token_strs only where they were asked for."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(Shape):
    """Text of tokens."""

    prompt: str


class Status(Shape):
    """A probe's answer."""

    status: Literal["ok", "degraded", "starting", "draining", "unavailable"]


class Health(Status):
    """The router's state and each worker's."""

    model: str
    fingerprint: str | None
    active_requests: int
    decode_workers: dict[str, dict[str, Any]]
    prefill_workers: dict[str, dict[str, Any]]
    workers: dict[str, dict[str, Any]]
    dns: dict[str, dict[str, Any]]


class AddedToken(Shape):
    """A token that is added to a vocabulary."""

    content: str
    single_word: bool
    lstrip: bool
    rstrip: bool
    normalized: bool
    special: bool


class TokenizerInfo(Shape):
    """What a tokenizer is; added_tokens_decoder: by token id. None of it says where its files are."""

    tokenizer_class: str
    vocab_size: int
    chat_template: str
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    added_tokens_decoder: dict[str, AddedToken]


class Load(Shape):
    """How many sequences run or wait."""

    server_load: int


class Version(Shape):
    """The server's version."""

    version: str


class ScrapeTarget(Shape):
    """Metrics at host:port, as Prometheus's HTTP service discovery takes them."""

    targets: list[str]
    labels: dict[str, str]
