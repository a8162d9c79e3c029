"""Where UCX's thread polls instead of sleeping."""

import pytest

from services.carriers import polls


@pytest.mark.parametrize(
    ("asked", "on_cuda", "cores", "polling"),
    [
        ("auto", True, 8, True),
        ("auto", True, 7, False),
        ("auto", False, 64, False),
        ("never", True, 64, False),
        ("always", False, 1, True),
    ],
)
def test_a_core_is_taken_where_it_is_asked_for_or_well_spent(asked, on_cuda, cores, polling):
    assert polls(asked, on_cuda=on_cuda, cores=cores) == polling
