"""The output of one HTTP request: the streams of its prompts, merged."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace

from kvrail.services.router.generate.output import PromptOutput
from kvrail.services.router.generate.prompt import PromptStream, Route
from kvrail.services.router.plan.translate import Plan
from kvrail.services.router.values import Ended, Updates
from kvrail.telemetry.moments import Moment, Timeline
from kvrail.telemetry.spans import Span
from kvrail.values.kv_cache import EXACT
from kvrail.wire.v1 import decode_pb2

MERGE_QUEUE = 64
"""Batches of updates of several prompts that wait for a slow client; then the prompts' streams wait too."""


class Generation:
    """All output of one HTTP request, over all its prompts. Leaving `updates` aborts what still runs."""

    def __init__(
        self, plan: Plan, route: Route, wire_id: str, *, model: str, client: str, trace_context: Mapping[str, str]
    ) -> None:
        """trace_context: headers of W3C Trace Context for the workers; empty without a trace."""
        self.model = model
        self._timeline = route.timeline
        self.plan = plan
        self._streams = []
        for i, (prompt, sampling, wire) in enumerate(zip(plan.prompts, plan.sampling, plan.wire, strict=True)):
            request = decode_pb2.GenerateRequest(
                request_id=wire_id if len(plan.prompts) == 1 else f"{wire_id}-{i}",
                model=model,
                prompt_token_ids=prompt,
                sampling=wire,
                codec=plan.codec,
                provisional=plan.provisional,
                trace=plan.traced,
                client=client,
                trace_context=trace_context,
                cache_salt=plan.cache_salt,
                exact=plan.kv_cache == EXACT,
            )
            turn = route.dispatcher.turn(client, prompt, sampling, plan.priority, plan.cache_salt, plan.kv_cache)
            self._streams.append(PromptStream(route, request, turn, PromptOutput(request, i * plan.n, plan)))
        route.timeline.mark(Moment.PLANNED)

    @property
    def summaries(self) -> list[decode_pb2.GenerateSummary]:
        """The summaries of the prompts whose output has ended."""
        return [ended.summary for ended in self._ended]

    @property
    def _ended(self) -> list[Ended]:
        """The prompts whose output has ended, by what their last workers said."""
        return [stream.output.ended for stream in self._streams if stream.output.ended is not None]

    @property
    def forms(self) -> list[str]:
        """The forms of pages from which the output was made."""
        return list(dict.fromkeys(form for stream in self._streams for form in stream.forms))

    @property
    def lossy(self) -> bool:
        """Whether a codec took bits from the KV of some of the output."""
        return any(stream.lossy for stream in self._streams) or any(each.lossy for each in self.summaries)

    @property
    def invariant(self) -> bool:
        """Whether every prompt's output has the bits that any of its workers would have given it."""
        return all(stream.invariant for stream in self._streams)

    def spans(self) -> list[Span]:
        """What workers did, in seconds since the request came; empty if no trace was asked for."""
        zero = self._timeline.get(Moment.DISPATCHED) or 0.0
        return [replace(span, begin=zero + ended.offset + span.begin) for ended in self._ended for span in ended.spans]

    def updates(self) -> AsyncGenerator[Updates]:
        """Output of all choices as it comes; raises the first error of any."""
        return self._streams[0].updates() if len(self._streams) == 1 else self._merged()

    async def _merged(self) -> AsyncGenerator[Updates]:
        """Updates of all prompts through one bounded queue; None marks the end of one."""
        queue: asyncio.Queue[Updates | Exception | None] = asyncio.Queue(MERGE_QUEUE)

        async def pump(stream: PromptStream) -> None:
            try:
                async with aclosing(stream.updates()) as batches:
                    async for updates in batches:
                        await queue.put(updates)
                await queue.put(None)
            except Exception as error:  # noqa: BLE001 - raised where the queue is read
                await queue.put(error)

        tasks = [asyncio.create_task(pump(stream)) for stream in self._streams]
        try:
            running = len(tasks)
            while running:
                item = await queue.get()
                if item is None:
                    running -= 1
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def adopt_marks(self) -> Timeline:
        """The request's timeline, with the marks of the stream that finished last: it decided how long it all took."""
        found = [[(moment, ended.offset + seconds) for moment, seconds in ended.marks] for ended in self._ended]
        if found:
            last = max(found, key=lambda marks: max((seconds for _, seconds in marks), default=0.0))
            self._timeline.merge(last, anchor=Moment.DISPATCHED)
        return self._timeline
