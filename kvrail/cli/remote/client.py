"""A small client of the OpenAI chat API: one answer at a time, streamed or whole."""

import json
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx

from kvrail.errors import (
    AuthenticationError,
    ConfigError,
    InvalidRequestError,
    KvrailError,
    ModelNotFoundError,
    OverloadedError,
    WorkerUnavailableError,
)

Json = dict[str, Any]
CONNECT_TIMEOUT_S = 5.0
SILENCE_TIMEOUT_S = 300.0
LOOPBACK = ("127.0.0.1", "localhost", "::1")
ERRORS: dict[int, type[KvrailError]] = {
    400: InvalidRequestError,
    401: AuthenticationError,
    404: ModelNotFoundError,
    429: OverloadedError,
}


class ChatClient:
    """Talks to one cluster. Errors of the network and of the API are raised as errors of kvrail."""

    def __init__(self, url: str, api_key: str) -> None:
        """url: the server's address, with or without /v1. api_key: empty where the server asks for none."""
        try:
            parts = urlsplit(url)
        except ValueError:
            parts = urlsplit("")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url: {url!r} is no address; write for example http://127.0.0.1:8000")
        self._url = url.rstrip("/").removesuffix("/v1")
        self._http = httpx.Client(
            base_url=f"{self._url}/v1",
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(SILENCE_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            trust_env=parts.hostname not in LOOPBACK,  # no proxy stands before this very machine
        )
        self.close = self._http.close

    def models(self) -> list[str]:
        """Names of the models that are served."""
        with self._reaching():
            response = self._http.get("/models")
            self._check(response)
            return [str(model["id"]) for model in response.json()["data"]]

    def chosen(self, name: str | None) -> str:
        """The model to ask: the one of this name, or the first that is served. Raises ConfigError without any."""
        models = [name] if name else self.models()
        if not models:
            raise ConfigError(f"{self._url} serves no model; start a cluster with `kvrail up`")
        return models[0]

    def health(self) -> Json:
        """The body of /health, whether or not requests are served."""
        with self._reaching("/health is no router's of kvrail"):
            response = self._http.get(f"{self._url}/health")
            if response.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                self._check(response)
            health: Json = response.json()
            health["status"]
            return health

    def answer(self, body: Mapping[str, Any]) -> Generator[str | Json, None, None]:
        """Stream the text that answers `body`, a chat completion request; closing the iterator cancels the request.

        Where it asks for drafts, news of them come too: the member `kvrail` of a chunk.
        """
        stream = self._http.stream("POST", "/chat/completions", json={**body, "stream": True})
        with self._reaching(), stream as response:
            if response.status_code != httpx.codes.OK:
                response.read()
            self._check(response)
            yield from self._updates(response.iter_lines())

    def complete(self, body: Mapping[str, Any]) -> Json:
        """The whole answer to `body`, a chat completion request that is not a stream."""
        with self._reaching():
            response = self._http.post("/chat/completions", json=body)
            self._check(response)
            answer: Json = response.json()
            return answer

    @contextmanager
    def _reaching(self, unlike: str = " does not speak OpenAI's API") -> Iterator[None]:
        """Name the server in errors of the network, and where an answer is not what is expected."""
        try:
            yield
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = f"{type(error).__name__}: {error}".rstrip(": ")
            raise WorkerUnavailableError(
                f"cannot reach {self._url} ({reason}); start a cluster with `kvrail up`, or name one with --url"
            ) from None
        except (ValueError, KeyError, TypeError):
            raise WorkerUnavailableError(f"{self._url}{unlike}; check --url") from None

    def _updates(self, lines: Iterator[str]) -> Iterator[str | Json]:
        """What each server-sent event brings. Raises where the stream reports an error or ends too early."""
        for line in lines:
            if not line.startswith("data:"):
                continue
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                raise WorkerUnavailableError(f"the answer broke off: {event['error'].get('message', event['error'])}")
            if news := event.get("kvrail"):
                yield news
            for choice in event.get("choices", ()):
                if text := choice["delta"].get("content"):
                    yield text
        raise WorkerUnavailableError(f"the answer broke off: {self._url} closed the stream; ask again")

    def _check(self, response: httpx.Response) -> None:
        if response.status_code == httpx.codes.OK:
            return
        try:
            message = str(response.json()["error"]["message"])
        except (ValueError, KeyError, TypeError):
            message = f"{self._url} answered with status {response.status_code}; check --url"
        if response.status_code == httpx.codes.UNAUTHORIZED:
            message += " (set KVRAIL_API_KEY or --api-key)"
        raise ERRORS.get(response.status_code, WorkerUnavailableError)(message)
