import os

import pytest


@pytest.fixture(autouse=True)
def no_settings_in_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("KVRAIL_", "_KVRAIL_")):
            monkeypatch.delenv(name)
