"""The door under TLS, workers under TLS behind it, and the port for operators."""

import asyncio
import ssl

import httpx
import openai
import pytest
from cryptography import x509

from kvrail.errors import ConfigError
from kvrail.security.tls import DoorCertificate
from tests.certificates import Authority
from tests.router.cluster import MODEL, OUTPUT, run_cluster, until


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    made = Authority(tmp_path_factory.mktemp("ca"))
    for role in ("router", "metrics", "decode", "prefill"):
        made.write(role)
    return made


def door(authority):
    paths = authority.settings("router")
    return {"tls_http_cert": paths["tls_cert"], "tls_http_key": paths["tls_key"], "tls_ca": paths["tls_ca"]}


def trusting(authority, role=None):
    context = ssl.create_default_context(cafile=str(authority.folder / "ca.pem"))
    if role is not None:
        context.load_cert_chain(authority.folder / f"{role}.pem", authority.folder / f"{role}.key")
    return context


@pytest.fixture
async def cluster(tokenizer, authority):
    """All there is: mTLS to workers, TLS at the door and at the admin port."""
    settings = {**authority.settings("router"), **door(authority), "admin_port": 0, "metrics_tls": True}
    async with run_cluster(tokenizer, tls=lambda role: authority.tls(role), **settings) as running:
        yield running


async def test_the_official_client_over_https(cluster, authority):
    async with httpx.AsyncClient(verify=trusting(authority)) as http:
        client = openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="unused", max_retries=0, http_client=http)
        stream = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True
        )
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]) == OUTPUT
    answer = await cluster.complete()
    assert answer.status_code == 200 and "strict-transport-security" not in answer.headers
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        async with httpx.AsyncClient() as http:
            await http.get(f"{cluster.url}/health")
    with pytest.raises(httpx.HTTPError):
        async with httpx.AsyncClient() as http:
            await http.get(cluster.url.replace("https", "http") + "/health")


async def test_a_handshake_that_does_not_end_has_the_time_of_headers(tokenizer, authority):
    async with run_cluster(tokenizer, client_timeout_s=0.3, **(door(authority) | {"tls_ca": ""})) as cluster:
        reader, writer = await asyncio.open_connection("localhost", int(cluster.url.rpartition(":")[2]))
        assert await asyncio.wait_for(reader.read(), 20) == b""  # asyncio would wait for a minute
        writer.close()


async def test_what_a_stranger_learns(cluster, authority):
    health = await cluster.http.get("/health")
    assert (health.status_code, health.json()) == (200, {"status": "ok"})
    for path in ("/metrics", "/metrics/vllm", "/drain"):
        assert (await cluster.http.get(path)).status_code == 404
    assert (await cluster.http.post("/drain")).status_code == 404
    assert "/metrics" not in (await cluster.http.get("/openapi.json")).json()["paths"]
    async with httpx.AsyncClient(base_url=cluster.admin_url, verify=trusting(authority)) as stranger:
        for path in ("/metrics", "/health", "/metrics/vllm"):
            assert (await stranger.get(path)).status_code == 403
        assert (await stranger.post("/drain")).status_code == 403
        assert (await stranger.get("/ready")).json() == {"status": "ok"}


async def test_what_an_operator_learns(cluster, authority):
    async with httpx.AsyncClient(base_url=cluster.admin_url, verify=trusting(authority, "metrics")) as operator:
        health = (await operator.get("/health")).json()
        assert list(health["decode_workers"]) == [cluster.decode[0].target]
        assert "kvrail_requests_total" in (await operator.get("/metrics")).text
        assert "vllm:" in (await operator.get("/metrics/vllm")).text


async def test_prometheus_is_told_to_come_by_https(cluster, authority):
    with httpx.Client(verify=trusting(authority, "router")) as http:
        found = await asyncio.to_thread(http.get, f"{cluster.admin_url}/metrics/targets")
    assert {target["labels"]["service"]: target["labels"]["__scheme__"] for target in found.json()} == {
        "router": "https"
    }


async def test_drain_is_asked_for_at_the_admin_port(tokenizer):
    async with run_cluster(tokenizer, admin_port=0) as cluster, httpx.AsyncClient(base_url=cluster.admin_url) as http:
        held = asyncio.Event()

        async def waits(worker, request):
            await held.wait()
            yield

        cluster.decode[0].script = waits
        running = asyncio.create_task(cluster.complete())
        await until(lambda: cluster.service.admission.active == 1)
        for _ in range(2):  # the second one hurries nobody
            assert (await http.post("/drain")).status_code == 202
        assert (await cluster.http.get("/health")).json() == {"status": "unavailable"}
        assert (await http.get("/health")).json()["status"] == "draining"
        assert (await cluster.complete()).status_code == 503
        assert not running.done()
        held.set()
        await running


async def test_no_page_in_a_browser_drains(tokenizer):
    async with run_cluster(tokenizer, admin_port=0) as cluster, httpx.AsyncClient(base_url=cluster.admin_url) as http:
        for origin in ("http://elsewhere.example", "null"):
            refused = await http.post("/drain", headers={"origin": origin})
            assert refused.status_code == 400
            assert origin in refused.json()["error"]["message"]
        assert (await cluster.complete()).status_code == 200


async def test_one_port_tells_all_as_long_as_no_other_is_set(tokenizer):
    async with run_cluster(tokenizer) as cluster:
        assert "decode_workers" in (await cluster.http.get("/health")).json()
        assert (await cluster.http.get("/metrics")).status_code == 200


async def test_a_new_certificate_at_the_door_under_a_running_stream(tokenizer, authority, monkeypatch):
    monkeypatch.setattr("kvrail.runtime.watched.LOOK_EVERY_S", 0.0)
    settings = {**authority.settings("router"), **door(authority)}
    async with run_cluster(tokenizer, tls=lambda role: authority.tls(role), **settings) as cluster:
        go, answered = asyncio.Event(), cluster.decode[0].script

        async def waits(worker, request):
            async for reply in answered(worker, request):
                yield reply
                await go.wait()

        async def shown():
            port = int(cluster.url.rpartition(":")[2])
            _, writer = await asyncio.open_connection("localhost", port, ssl=trusting(authority))
            serial = writer.get_extra_info("peercert")["serialNumber"]
            writer.close()
            return serial

        cluster.decode[0].script = waits
        body = {"model": MODEL, "prompt": "hi", "stream": True}
        async with cluster.http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            assert (await anext(lines)).startswith("data:")
            before = await shown()
            authority.write("router")
            assert await shown() != before
            (authority.folder / "router.pem").write_text("broken")
            assert await shown() != before
            go.set()
            assert [line async for line in lines][-2:] == ["data: [DONE]", ""]
        authority.write("router")


async def test_metrics_tell_when_certificates_end(tokenizer, authority, monkeypatch):
    monkeypatch.setattr("kvrail.runtime.watched.LOOK_EVERY_S", 0.0)

    def end(name):
        pem = (authority.folder / f"{name}.pem").read_bytes()
        return x509.load_pem_x509_certificate(pem).not_valid_after_utc.timestamp()

    authority.write("router", "door", lives=20)
    paths = authority.settings("door")
    settings = {**authority.settings("router"), "tls_http_cert": paths["tls_cert"], "tls_http_key": paths["tls_key"]}
    async with run_cluster(tokenizer, tls=lambda role: authority.tls(role), **settings) as cluster:
        metric = "kvrail_certificate_end_seconds"
        assert await cluster.metric(f'{metric}{{use="services"}}') == end("router")
        assert await cluster.metric(f'{metric}{{use="door"}}') == end("door") > end("router")
        authority.write("router", lives=5)  # nobody has connected with the new one yet
        assert await cluster.metric(f'{metric}{{use="services"}}') == end("router")
    authority.write("router")
    async with run_cluster(tokenizer) as cluster:
        assert f"\n{metric}{{" not in (await cluster.http.get("/metrics")).text


@pytest.mark.parametrize("settings", ["without", "of another CA"])
async def test_workers_that_refuse_the_router_get_nothing_and_health_says_why(
    tokenizer, authority, settings, tmp_path_factory
):
    """Nothing hangs: a request gets a 503 at once."""
    foreign = Authority(tmp_path_factory.mktemp("foreign"))
    own = {} if settings == "without" else foreign.write("router")
    async with run_cluster(tokenizer, tls=lambda role: authority.tls(role), wait_healthy=False, **own) as cluster:
        cluster.service.pool._settled.set()  # the start is over
        pool = cluster.service.pool
        await until(lambda: all(worker.failure for worker in pool.workers))
        health = (await cluster.http.get("/health")).json()
        for worker in (*health["decode_workers"].values(), *health["prefill_workers"].values()):
            assert worker["state"] == "starting" and "compare --tls-ca" in worker["detail"]
        assert (await cluster.complete()).status_code == 503


async def test_a_router_with_anothers_certificate_does_not_start(tokenizer, authority):
    with pytest.raises(ConfigError, match="not one of a router"):
        async with run_cluster(tokenizer, **authority.settings("decode")):
            pass


@pytest.mark.parametrize(
    ("cert", "key", "match"),
    [
        ("missing.pem", "router.key", "--tls-http-cert .*missing.pem: No such file"),
        ("router.pem", "decode.key", "--tls-http-key .*decode.key does not belong to"),
        ("router.key", "router.key", "--tls-http-cert .*holds no certificate"),
        ("router.pem", "router.pem", "--tls-http-key .*is no PEM key"),
        ("router.pem", "", "--tls-http-cert and --tls-http-key"),
    ],
)
def test_files_of_the_door_are_checked_at_start(authority, cert, key, match):
    with pytest.raises(ConfigError, match=match):
        DoorCertificate.of(str(authority.folder / cert), key and str(authority.folder / key))
