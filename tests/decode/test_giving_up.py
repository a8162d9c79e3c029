"""A request is given up in the very turn in which it, or an attempt to fetch its KV, comes to its end."""

import asyncio
import contextlib
from types import SimpleNamespace

import pytest

from kvrail.errors import DeadlineError, OverloadedError, WorkerUnavailableError
from kvrail.services.decode.fetch_attempt import FetchAttempt
from kvrail.services.decode.local import LocalFallbacks
from kvrail.services.decode.prefill_workers import PrefillTarget
from kvrail.services.decode.prompt_fetch import PromptFetch
from kvrail.values.layout import KVLayout
from kvrail.values.sampling import SamplingParams


def made(kind, **attributes):
    """An object of `kind` that has no more than these attributes."""
    it = object.__new__(kind)
    for name, value in attributes.items():
        setattr(it, name, value)
    return it


class Payloads:
    closed = False

    async def aclose(self):
        self.closed = True


@pytest.mark.parametrize("given_up", [False, True])
async def test_a_data_connection_is_closed(given_up):
    payloads = Payloads()
    model, access = SimpleNamespace(fingerprint="f"), SimpleNamespace(layout=KVLayout(1, 1, 4, 4, 16, "float32"))
    attempt = made(
        FetchAttempt,
        _parts=SimpleNamespace(
            transports=SimpleNamespace(all=[]), model=SimpleNamespace(loaded=model), access=access, max_frame_bytes=1
        ),
        _progress=SimpleNamespace(spans=None, trace=None),
        _request=SimpleNamespace(
            caller_id="r", prompt_ids=(1, 2), client="c", cache_salt="", params=SamplingParams(max_tokens=4, seed=1)
        ),
        _codecs={},
        _held_pages=0,
        _key=1,
        _payloads=payloads,
        _first=asyncio.create_task(asyncio.sleep(100)),
    )

    @contextlib.asynccontextmanager
    async def call(*_, **__):
        yield SimpleNamespace(accepted_already=None)

    async def fails():
        async with attempt.asked(SimpleNamespace(prefill=call, host="127.0.0.1"), None, 0, ()):
            if given_up:
                asyncio.get_running_loop().call_soon(asking.cancel)
            raise WorkerUnavailableError("it died")

    asking = asyncio.create_task(fails())
    with pytest.raises(asyncio.CancelledError if given_up else WorkerUnavailableError):
        await asking
    assert payloads.closed and attempt._first.cancelled()


@pytest.mark.parametrize("error", [OverloadedError, DeadlineError, WorkerUnavailableError])
async def test_a_transport_is_avoided_where_it_may_have_failed(error):
    """Not where the worker, which had accepted, has no room or time for the request."""
    avoided, failed = [], []

    @contextlib.asynccontextmanager
    async def asked(*_):
        yield

    async def receive():
        raise error("not now")

    received = SimpleNamespace(transport="ucx", payload_bytes=0)
    chooser = SimpleNamespace(link_bytes_per_s=lambda _: 0, observe_link=lambda *_: None)
    breaker = SimpleNamespace(allows=True, begin=lambda: 0.0, failed=failed.append, left=lambda _: None)
    fetch = made(
        PromptFetch,
        _fetcher=SimpleNamespace(
            breakers=SimpleNamespace(of=lambda _: breaker),
            chooser=chooser,
            workers=SimpleNamespace(client=lambda _: None),
            offered_transports=lambda _: (),
            avoid=lambda *pair: avoided.append(pair),
        ),
        _progress=SimpleNamespace(committed=False),
        _until=None,
    )
    attempt = SimpleNamespace(received=received, crossing=None, asked=asked, receive=receive, drafting=False)
    assert not await fetch._from_worker(PrefillTarget("p:1"), attempt)
    expected = error is WorkerUnavailableError
    assert (avoided, failed) == (([("p:1", "ucx")], [0.0]) if expected else ([], []))


async def test_tokens_that_were_to_be_computed_here_no_longer_wait():
    fallbacks = LocalFallbacks(16384)
    fallbacks.take("r", 12000)
    fetch = made(
        PromptFetch,
        _fetcher=SimpleNamespace(fallbacks=fallbacks),
        _progress=SimpleNamespace(committed=False),
        _request=SimpleNamespace(request_id="r"),
        _source=None,
        computing_here=True,
        _task=asyncio.create_task(asyncio.sleep(0)),
    )
    await fetch._task

    async def leaves():
        asyncio.get_running_loop().call_soon(leaving.cancel)
        await fetch.leave()

    leaving = asyncio.create_task(leaves())
    await asyncio.wait([leaving])
    fallbacks.take("other", 12000)
