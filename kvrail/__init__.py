"""LLM serving with prefill and decode on separate workers; ARCHITECTURE.md has the map."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("kvrail")
except PackageNotFoundError:  # the sources alone are on the path
    __version__ = "0+uninstalled"
