"""The file of API keys, with their limits. It holds hashes, no keys.

TOML, a table for each key; everything but name and sha256 may be left out:

    [[keys]]
    name = "alice"                 # in metrics and logs
    sha256 = "9f86d081884c7d65…"   # of the key, as `kvrail keys add` writes it
    requests_per_minute = 60
    tokens_per_minute = 100000     # of prompts and outputs
    concurrent_requests = 8
    models = ["kvrail-demo"]       # names that it may ask for; none given: all
    expires = 2027-01-31           # or a time: 2027-01-31T12:00:00Z
"""

import hashlib
import hmac
import secrets
import tomllib
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, time
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt, StringConstraints, ValidationError

from kvrail.errors import AuthenticationError, ConfigError
from kvrail.runtime.watched import Watched, content_of

PREFIX = "kvrail-"
SECRET_BYTES = 32
MAX_KEYS = 10_000
"""Each has series of metrics of its own."""
NAME = r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}"


def _moment(value: object) -> object:
    """A date as its first moment; times without a zone are UTC."""
    if isinstance(value, date) and not isinstance(value, datetime):
        value = datetime.combine(value, time())
    if isinstance(value, datetime) and value.tzinfo is None:
        value = value.replace(tzinfo=UTC)
    return value


class Key(BaseModel):
    """One key: whose it is and what it allows. None: no limit."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: Annotated[str, StringConstraints(pattern=f"^{NAME}$")]
    sha256: Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")] = Field(repr=False)
    requests_per_minute: PositiveInt | None = None
    tokens_per_minute: PositiveInt | None = None
    concurrent_requests: PositiveInt | None = None
    models: list[str] = []
    expires: Annotated[datetime | None, BeforeValidator(_moment)] = None

    @property
    def expired(self) -> bool:
        """Whether its last moment is over."""
        return self.expires is not None and self.expires <= datetime.now(UTC)

    def may_ask_for(self, model: str) -> bool:
        """Whether it is good for a model of this name."""
        return not self.models or model in self.models


def new_secret() -> str:
    """A key, of 256 random bits; no slow hash is needed to keep it."""
    return PREFIX + secrets.token_urlsafe(SECRET_BYTES)


def hash_of(secret: str) -> str:
    """What the file keeps of a key."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def parse(content: bytes, where: str) -> dict[str, Key]:
    """Keys by their hash. Raises ConfigError that names the key and the field; `where` names the file."""
    try:
        found = tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where} is not TOML: {error}; correct the file") from None
    tables = found.pop("keys", [])
    if found or not isinstance(tables, list):
        raise ConfigError(f"{where} has more than tables [[keys]] ({', '.join(found) or 'keys'}); take it out")
    if len(tables) > MAX_KEYS:
        raise ConfigError(f"{where} has {len(tables)} keys; {MAX_KEYS} are the most")
    keys: dict[str, Key] = {}
    names: set[str] = set()
    for place, table in enumerate(tables, 1):
        try:
            key = Key.model_validate(table)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            name = table.get("name", "without a name") if isinstance(table, dict) else "that is no table"
            field = ".".join(map(str, first["loc"])) or "it"
            raise ConfigError(f"{where}: key {place} ({name}): {field}: {first['msg']}; correct it") from None
        if key.name in names or key.sha256 in keys:
            raise ConfigError(
                f"{where}: key {place} ({key.name}) is there twice; names and hashes are for one key each"
            )
        names.add(key.name)
        keys[key.sha256] = key
    return keys


class KeyFile:
    """The keys in the file; after a change that is not valid they stay as they were."""

    def __init__(self, path: str) -> None:
        """Read it. Raises ConfigError."""
        self._path, self._where = Path(path), f"--api-keys-file {path}"
        self._reloads = False
        self._keys = Watched((self._path,), self._read)
        self._reloads = True

    def _read(self) -> dict[str, Key]:
        content = content_of("--api-keys-file", self._path)
        if self._reloads and not content:
            raise ConfigError(f"{self._where} is empty, as while it is written; for no keys, leave a comment in it")
        return parse(content, self._where)

    def on_failure(self, call: Callable[[], object]) -> None:
        """Call this for each change that is not valid."""
        self._keys.on_failure = call

    def keys(self) -> Mapping[str, Key]:
        """All of them, by their hash."""
        return self._keys.get()

    def find(self, secret: str) -> Key | None:
        """The key that this secret is, or None. Raises AuthenticationError where it has expired.

        The lookup is by hash, so its timing reveals nothing about a secret.
        """
        digest = hash_of(secret)
        key = self._keys.get().get(digest)
        if key is None or not hmac.compare_digest(key.sha256, digest):
            return None
        if key.expires is not None and key.expired:
            raise AuthenticationError(
                f"the API key {key.name!r} expired {key.expires:%Y-%m-%d %H:%M} UTC; get a new one"
            )
        return key
