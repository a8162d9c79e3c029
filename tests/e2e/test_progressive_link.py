"""Between two network namespaces: behind a slow link decode starts on coarse KV, and ends with raw's text."""

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from benchmarks.link import DECODE_HOST, PREFILL_HOST, UNLIMITED, Cluster, limit, linked, prompt_of
from benchmarks.progressive_client import TIMEOUT_S, ask
from tests.forked import Forked

TOKENS, OUTPUT_TOKENS = 700, 40
RATE = "10mbit"
"""The second stage of so many tokens takes more than a second: there is time to draft on any machine."""
PORTS = range(18720, 18724)
CODEC = "splitzip-progressive-ans"


def in_namespace(spaces, folder):
    """What a client gets with raw on an open link, then on a slow one with CODEC: quietly, then with drafts shown."""
    # a later stage's frame that left early holds up little
    flags = ["--transfer-timeout-s", "200"]
    small = ["--transfer-memory-mib", "4"]
    cluster = Cluster(
        folder, PREFILL_HOST, DECODE_HOST, spaces[0], PORTS, prefill_flags=flags, decode_flags=[*small, *flags]
    )
    client = httpx.Client(base_url=cluster.url, timeout=TIMEOUT_S)
    try:
        asked = client, cluster.model, prompt_of(TOKENS), OUTPUT_TOKENS
        raw = ask(*asked, "raw", provisional=True)
        limit(spaces, RATE)
        quiet = ask(*asked, CODEC, provisional=False)
        slow = ask(*asked, CODEC, provisional=True)
    finally:
        cluster.stop()
    return [(trace.text, trace.verified, trace.shown, trace.usage) for trace in (raw, quiet, slow)]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    try:
        with linked(UNLIMITED) as spaces:
            folder = tmp_path_factory.mktemp("link")
            arguments, log = [*spaces, folder], folder.with_name("link.log")
            done = Forked(arguments, log, "tests.e2e.test_progressive_link", namespace=spaces[1]).wait()
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        assert not os.environ.get("CI"), error
        pytest.skip(f"network namespaces need root and iproute2: {error}")
    assert done == 0, log.read_text()
    return json.loads(log.read_text().splitlines()[-1])


def test_drafts_are_made_and_the_text_is_raws(answers):
    raw, *others = answers
    for text, _, _, usage in others:
        assert text == raw[0] != ""
        assert (usage["codec"], usage["lossy"]) == (CODEC, False)
        assert 0 < usage["drafts_accepted"] <= usage["drafts_proposed"]
    assert raw[3]["drafts_proposed"] == 0


def test_drafts_are_shown_before_they_are_verified_to_those_who_ask(answers):
    raw, quiet, (_, verified, seen, usage) = answers
    drafted = [each for each in seen if each not in verified]
    assert [count for _, count in drafted] == list(range(2, usage["drafts_proposed"] + 2))
    assert [count for _, count in verified][:2] == [1, 2]
    assert drafted[-1][0] < verified[1][0]  # the last draft came before the second verified token
    assert (quiet[1], raw[1]) == (quiet[2], raw[2])


if __name__ == "__main__":
    sys.stdout.write(json.dumps(in_namespace(sys.argv[1:3], Path(sys.argv[3]))))
