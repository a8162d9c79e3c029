"""The cluster of benchmarks/link.py without its link: every exact codec serves what raw serves, in fewer bytes."""

import pytest

from benchmarks.link import Cluster, prompt_of
from codec import registry
from tests.e2e.test_lost_workers import free_ports

TOKENS = 1000
LEAST_RATIO = {
    "raw": 1.0,
    "splitzip": 1.30,
    "splitzip-channel": 1.38,
    "splitzip-progressive": 1.37,
    "splitzip-zstd": 1.49,
    "splitzip-ans": 1.45,
    "lynx-exact": 1.2,
}
EXACT = [name for name in registry.names() if registry.get(name).exact]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    started = Cluster(tmp_path_factory.mktemp("link"), "127.0.0.1", "127.0.0.1", None, free_ports(4))
    yield started
    started.stop()


def test_every_exact_codec_serves_the_same_text_in_fewer_bytes(cluster):
    answers = {codec: cluster.ask(prompt_of(TOKENS), codec) for codec in EXACT}
    pages = -(-TOKENS // 64)
    for codec, answer in answers.items():
        assert answer.text == answers["raw"].text != ""
        assert answer.raw_bytes == pages * 64 * 8 * 2 * 4 * 64 * 2
        assert answer.raw_bytes / answer.payload_bytes >= LEAST_RATIO[codec], codec
        assert answer.seconds > 0
