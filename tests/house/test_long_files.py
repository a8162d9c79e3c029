"""The order in which files of tests are begun."""

from tests.conftest import LONG, TESTS


def test_every_long_file_is_there():
    missing = [name for name in LONG if not (TESTS / name).is_file()]
    assert not missing, f"tests/conftest.py names files that are not there: {missing}"
