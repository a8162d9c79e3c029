from collections.abc import Iterator

import pytest

from tests.e2e.cluster import Cluster, started

DEFAULTS = '{"temperature": 0, "max_new_tokens": 2000}'
"""Suites want answers that end by themselves: whether these do must not be a matter of luck."""


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One for all clients, which ask it one after another."""
    with started(tmp_path_factory, "--override-generation-config", DEFAULTS) as running:
        yield running
