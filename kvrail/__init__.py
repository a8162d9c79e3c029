"""What kvrail's services share: settings, errors, wire, transports and the engine."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("kvrail")
except PackageNotFoundError:  # the sources alone are on the path
    __version__ = "0+uninstalled"
