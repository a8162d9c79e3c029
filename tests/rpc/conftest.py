import asyncio
import importlib.util


def pytest_asyncio_loop_factories(config, item):
    """gRPC brings a poller of its own, so it is tried on both loops where both are installed."""
    factories = {"asyncio": asyncio.new_event_loop}
    if importlib.util.find_spec("uvloop") is not None:
        import uvloop

        factories["uvloop"] = uvloop.new_event_loop
    return factories
