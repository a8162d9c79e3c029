"""What the door does beside answering: names of the model, keys, browsers, probes."""

import pytest

from kvrail.config.settings import RouterSettings
from kvrail.errors import ConfigError
from kvrail.text import Tokenizer
from tests.router.cluster import MODEL, OUTPUT, Cluster, run_cluster
from tests.router.scripts import error_of

PAGE = "http://localhost:5173"


async def test_a_model_of_several_names(tokenizer: Tokenizer):
    async with run_cluster(tokenizer, served_model_name="tiny, gpt-4o ,tiny-2") as cluster:
        listed = (await cluster.http.get("/v1/models")).json()["data"]
        assert [card["id"] for card in listed] == ["tiny", "gpt-4o", "tiny-2"]
        assert (await cluster.http.get("/v1/models/gpt-4o")).json()["id"] == "gpt-4o"
        assert (await cluster.chat(model="gpt-4o")).json()["model"] == "gpt-4o"
        assert cluster.decode[0].requests[0].model == "tiny"  # among each other they use the first
        assert '"model":"tiny-2"' in (await cluster.complete(model="tiny-2", stream=True)).text
        message = error_of(await cluster.chat(model="gpt-5"), 404, "model_not_found")
        assert all(repr(name) in message for name in ("tiny", "gpt-4o", "tiny-2"))


async def test_clients_do_not_learn_where_the_model_lies(cluster: Cluster):
    folder = cluster.service.settings.model
    for path in ("/v1/models", f"/v1/models/{MODEL}", "/health", "/version", "/status.json", "/openapi.json", "/v1/x"):
        assert folder not in (await cluster.http.get(path)).text
    assert (await cluster.http.get(f"/v1/models/{MODEL}")).json()["root"] == MODEL
    assert folder not in (await cluster.chat(model=folder + "x")).text.replace(folder + "x", "")


async def test_a_slash_behind_a_path_changes_nothing(tokenizer: Tokenizer):
    async with run_cluster(tokenizer, api_keys=["k"], admin_port=0) as cluster:
        key = {"x-api-key": "k", "host": "evil.example"}
        asked = {"model": MODEL, "prompt": "hi"}
        answer = await cluster.http.post("/v1/completions/", json=asked, headers=key)
        assert answer.json()["choices"][0]["text"] == OUTPUT
        assert (await cluster.http.post("/v1/completions/", json=asked)).status_code == 401
        assert (await cluster.http.get("/v1/models/", headers=key)).json()["data"][0]["id"] == MODEL
        assert (await cluster.http.get("/health/", headers=key)).json() == {"status": "ok"}
        assert (await cluster.http.get(f"{cluster.admin_url}/health/", headers=key)).json()["model"] == MODEL
        error_of(await cluster.http.get("/v1/nothing/", headers=key), 404, "not_found")
        error_of(await cluster.http.get("/v1/completions/", headers=key), 405, "method_not_allowed")


async def test_browsers_of_named_origins(tokenizer: Tokenizer):
    preflight = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "x-api-key"}
    async with run_cluster(tokenizer, cors_origins=[PAGE], api_keys=["k"]) as cluster:
        asked = await cluster.http.options("/v1/messages", headers=preflight)
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == PAGE
        assert "x-api-key" in asked.headers["access-control-allow-headers"]
        answer = await cluster.http.get("/v1/models", headers={"origin": PAGE, "x-api-key": "k"})
        assert answer.headers["access-control-allow-origin"] == PAGE
        refused = await cluster.http.get("/v1/models", headers={"origin": PAGE})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == PAGE  # so that the page can read why
        other = await cluster.http.get("/v1/models", headers={"origin": "http://other", "x-api-key": "k"})
        assert "access-control-allow-origin" not in other.headers


async def test_no_origin_is_allowed_unless_named(cluster: Cluster):
    answer = await cluster.http.get("/v1/models", headers={"origin": PAGE})
    assert "access-control-allow-origin" not in answer.headers


def test_origins_are_checked_at_start():
    with pytest.raises(ConfigError, match="--cors-origins"):
        RouterSettings.load({"cors_origins": "localhost"})


async def test_probes(cluster: Cluster):
    for path in ("/live", "/ready", "/health"):
        answer = await cluster.http.get(path)
        head = await cluster.http.head(path)
        assert (answer.status_code, head.status_code) == (200, 200)
        assert head.headers["content-length"] == answer.headers["content-length"]
        assert head.content == b""
    cluster.server._app.state.service.admission.draining = True
    try:
        assert (await cluster.http.get("/live")).status_code == 200
        ready = await cluster.http.head("/ready")
        assert (ready.status_code, ready.headers["retry-after"]) == (503, "1")
        assert (await cluster.http.get("/ready")).json() == {"status": "draining"}
    finally:
        cluster.server._app.state.service.admission.draining = False


async def test_the_page_of_the_api_needs_nobody_else(tokenizer: Tokenizer):
    async with run_cluster(tokenizer, api_keys=["k"]) as cluster:
        page = await cluster.http.get("/docs")
        assert page.headers["content-type"].startswith("text/html")
        assert "openapi.json" in page.text
        assert "//" not in page.text.replace("</", "")  # no address of another server
        assert (await cluster.http.get("/openapi.json")).status_code == 200
