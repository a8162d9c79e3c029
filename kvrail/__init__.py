"""LLM serving with prefill and decode on separate workers; ARCHITECTURE.md has the map."""

import importlib
import importlib.util
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvrail.offline.llm import LLM
    from kvrail.offline.outputs import CompletionOutput, RequestOutput
    from kvrail.offline.sampling import SamplingParams

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams"]

try:
    __version__ = version("kvrail")
except PackageNotFoundError:  # the sources alone are on the path
    __version__ = "0+uninstalled"

_MODULES = {"LLM": "llm", "CompletionOutput": "outputs", "RequestOutput": "outputs", "SamplingParams": "sampling"}
"""Modules of kvrail.offline with these names, imported on first use: LLM loads torch, and the router must not."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'kvrail' has no attribute {name!r}")
    if name == "LLM" and importlib.util.find_spec("torch") is None:
        raise ImportError("torch is not installed, and kvrail.LLM needs it; pip install 'kvrail[worker]'")
    return getattr(importlib.import_module(f"kvrail.offline.{_MODULES[name]}"), name)
