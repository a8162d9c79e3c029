from collections.abc import Iterator

import pytest

from tests.e2e.cluster import Cluster, started


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One for all clients, which ask it one after another."""
    with started(tmp_path_factory) as running:
        yield running
