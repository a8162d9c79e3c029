"""What kvrail's services share: settings, errors, wire, transports and the engine."""

__version__ = "0.1.0"
