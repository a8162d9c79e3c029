"""Who a client is where requests come from proxies: the connection's address, unless a trusted proxy names another."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from kvrail.config.settings import RouterSettings
from kvrail.errors import ConfigError
from kvrail.services.router.http import middleware
from kvrail.services.router.http.clients import client_of
from kvrail.text import Tokenizer
from tests.router.cluster import Cluster, run_cluster

NAMED = {"x-forwarded-for": "192.0.2.7"}


@asynccontextmanager
async def watched(
    tokenizer: Tokenizer, monkeypatch, **settings
) -> AsyncIterator[tuple[Cluster, list[tuple[str, str]]]]:
    """A cluster, and who its clients were: scheme and client of each request."""
    seen: list[tuple[str, str]] = []

    def noted(scope, key):
        seen.append((scope["scheme"], client_of(scope, key)))
        return seen[-1][1]

    monkeypatch.setattr(middleware, "client_of", noted)
    async with run_cluster(tokenizer, **settings) as cluster:
        yield cluster, seen


async def test_nobody_is_believed_by_default(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")  # uvicorn's own
    async with watched(tokenizer, monkeypatch, admin_port=0) as (cluster, seen):
        await cluster.http.get("/v1/models", headers={**NAMED, "x-forwarded-proto": "https"})
        assert seen == [("http", "127.0.0.1")]
        targets = await cluster.http.get(f"{cluster.admin_url}/metrics/targets", headers={"x-forwarded-proto": "https"})
        assert '"https"' not in targets.text


@pytest.mark.parametrize(
    ("proxies", "said", "client"),
    [
        ("127.0.0.1", "192.0.2.7", "192.0.2.7"),
        ("127.0.0.0/8", "192.0.2.7:4711", "192.0.2.7"),
        ("10.0.0.0/8, 127.0.0.1", "198.51.100.1, 192.0.2.7, 10.1.2.3", "192.0.2.7"),  # what the client wrote is first
        ("127.0.0.1", "2001:db8::1", "2001:db8::/64"),
        ("127.0.0.1", "::ffff:192.0.2.7", "192.0.2.7"),
        ("127.0.0.1", "", "127.0.0.1"),
        ("10.0.0.0/8", "192.0.2.7", "127.0.0.1"),
        ("::1", "192.0.2.7", "127.0.0.1"),
    ],
)
async def test_a_trusted_proxy_says_who_asks(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, proxies: str, said: str, client: str
):
    async with watched(tokenizer, monkeypatch, trusted_proxies=proxies) as (cluster, seen):
        await cluster.http.get("/v1/models", headers={"x-forwarded-for": said, "x-forwarded-proto": "https"})
        trusted = "127" in proxies
        assert seen == [("https" if trusted else "http", client)]


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
async def test_ipv4_clients_of_a_socket_for_both_are_told_apart(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    async with watched(tokenizer, monkeypatch, trusted_proxies="127.0.0.2") as (cluster, seen):
        both = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        server = cluster.server
        await server.startup(sockets=[both])
        for own in ("127.0.0.1", "127.0.0.2", "127.0.0.3"):
            transport = httpx.AsyncHTTPTransport(local_address=own)
            async with httpx.AsyncClient(transport=transport) as http:
                await http.get(f"http://127.0.0.1:{both.getsockname()[1]}/v1/models", headers=NAMED)
        assert [client for _, client in seen] == ["127.0.0.1", "192.0.2.7", "127.0.0.3"]


@pytest.mark.parametrize("value", ["10.0.0.1/8", "proxy.example", "*", "127.0.0.1:80"])
def test_proxies_are_checked_at_start(value: str):
    with pytest.raises(ConfigError, match=r"--trusted-proxies: .*write each proxy as an address or a network"):
        RouterSettings.load({"trusted_proxies": value})
