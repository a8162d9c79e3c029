"""A cluster under TLS says the same tokens, and its payloads are encrypted."""

import pytest

from kvrail.config.settings import DecodeSettings, PrefillSettings
from kvrail.errors import ConfigError
from kvrail.transport.tcp.sealed import SealedStream
from kvrail.worker.transports import Transports, in_clear, taken
from tests.certificates import Authority
from tests.cluster.cluster import WITHOUT_UCX, cluster, settings
from tests.cluster.test_equality import prompt_of
from tests.models import generate, tiny_model

FOLDER = tiny_model("llama")


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    made = Authority(tmp_path_factory.mktemp("ca"))
    for role in ("router", "prefill", "decode"):
        made.write(role)
    return made


async def test_tokens_are_the_same_and_payloads_sealed(authority, monkeypatch):
    sealed = []
    send = SealedStream.send
    monkeypatch.setattr(SealedStream, "send", lambda self, *parts: sealed.append(len(parts[-1])) or send(self, *parts))
    async with cluster(FOLDER, "tcp", authority=authority) as c:
        for length in (65, 500):
            prompt = prompt_of(length)
            answer = await c.ask(prompt, max_tokens=24)
            assert answer.tokens == {0: generate(str(FOLDER), tuple(prompt), 24)}, length
            assert answer.summary.prefill_worker and answer.summary.transport == "tcp"
            assert sum(sealed) == answer.summary.kv_bytes > 0
            sealed.clear()
        await c.settled()


@pytest.mark.skipif(bool(WITHOUT_UCX), reason=WITHOUT_UCX)
async def test_ucx_has_to_be_asked_for_beside_tls(authority, caplog):
    import torch

    paths = authority.settings("decode")
    for cls in (PrefillSettings, DecodeSettings):
        with pytest.raises(ConfigError, match="--ucx-in-clear"):
            await Transports.start(settings(cls, FOLDER, transport="ucx", **paths), torch.device("cpu"))
        auto = await Transports.start(settings(cls, FOLDER, transport="auto", **paths), torch.device("cpu"))
        assert auto.names == ["tcp"]
        await auto.aclose()
        assert not [record for record in caplog.records if record.levelname == "WARNING"]
        options = settings(cls, FOLDER, transport="auto", ucx_in_clear=True, ucx_host="127.0.0.1", **paths)
        asked = await Transports.start(options, torch.device("cpu"))
        assert asked.names == taken(options) == ["ucx", "tcp"] and in_clear(options, asked.names) == ["ucx"]
        await asked.aclose()
        (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert "unencrypted by ucx although calls are encrypted" in warning
        caplog.clear()
