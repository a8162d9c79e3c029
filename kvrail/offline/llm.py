"""`LLM`: a model in the caller's process, behind the engine that workers have."""

import asyncio
import concurrent.futures
import itertools
import random
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self, TypeVar, Unpack

from kvrail.config.settings import RouterSettings
from kvrail.engine.aio import EventRouter
from kvrail.engine.engine import Engine
from kvrail.engine.request.requests import EngineRequest
from kvrail.errors import InvalidRequestError, WorkerUnavailableError
from kvrail.grammar import Checker, Grammars
from kvrail.offline.outputs import Collector, RequestOutput
from kvrail.offline.sampling import SamplingParams, read
from kvrail.offline.settings import LLMSettings, Options
from kvrail.runtime import loops
from kvrail.services.router.plan.defaults import defaults_of
from kvrail.services.router.plan.encoding import Encoder
from kvrail.services.router.plan.shaping import Shaper
from kvrail.services.router.plan.translate import Limits, Plan, Planner
from kvrail.services.router.schema import DEFAULT_COMPLETION_TOKENS, ChatRequest, CompletionRequest
from kvrail.telemetry.series import Registry
from kvrail.telemetry.startup import Startup
from kvrail.text import load_tokenizer
from kvrail.wire.convert import sampling_from_proto
from kvrail.worker.process import build_engine
from kvrail.worker.weights import forms_of

T = TypeVar("T")
Prompt = str | list[int]
Messages = Sequence[Mapping[str, Any]]
Params = SamplingParams | Sequence[SamplingParams] | None
Plans = list[tuple[str | None, Plan]]
"""For each prompt: its text, None if token ids were given, and what to generate."""


class LLM:
    """A model that generates in this process. Any number of threads may use it.

    model: a local folder or a Hub name. seed: the same calls give the same outputs; None: a request without a seed
    draws a random one. options: a worker's settings (docs/configuration.md); device "auto", the default, is CUDA if
    torch finds a GPU, else the CPU. Raises ConfigError or UnsupportedModelError.

    `close` or the end of a `with` block stops it; so does the end of the object or of the interpreter.
    """

    def __init__(self, model: str, *, seed: int | None = None, **options: Unpack[Options]) -> None:
        settings = LLMSettings.of(model, options)
        tokenizer = load_tokenizer(model)
        defaults = defaults_of(RouterSettings.model_construct(model=model))
        loop = (loops.loop_factory() or asyncio.new_event_loop)()
        try:
            self._events = EventRouter(loop)
            registry = Registry()
            loaded, _, self._engine = build_engine(
                settings,
                registry,
                Startup(registry, settings.model_name, settings.table),
                self._events.deliver,
                tokenizer,
                weights=forms_of(settings),
            )
        except BaseException:
            loop.close()
            raise
        self._tokenizer = tokenizer
        limits = Limits(loaded.max_model_len, min(loaded.vocab_size, tokenizer.vocab_size), frozenset(), frozenset())
        checker = Checker(tokenizer)
        shaper = Shaper(tokenizer, checker, tool_parser="none", reasoning_parser="none")
        self._planner = Planner(Encoder(tokenizer), shaper, lambda _: limits, defaults)
        self._grammars = Grammars(lambda: tokenizer, loaded.eos_token_ids, loaded.vocab_size)
        self._places = asyncio.Semaphore(settings.max_waiting)
        self._numbers = itertools.count()
        self._random = None if seed is None else random.Random(seed)
        self._engine.start()
        self._host = _Host(loop, self._engine, checker)
        self._end = weakref.finalize(self, self._host.end)

    def generate(self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None) -> list[RequestOutput]:
        """Continue prompts, texts or token ids. Returns one result a prompt, in their order.

        sampling_params: one for all prompts, or one for each; None: as the model's generation_config.json says, and 16
        tokens. If one prompt is wrong, InvalidRequestError names it and nothing is generated.
        """
        if not isinstance(prompts, str | Sequence):
            raise InvalidRequestError(f"prompts is {prompts!r}; give a text, token ids, or a list of either")
        alone = isinstance(prompts, str) or (prompts and isinstance(prompts[0], int))
        return self._generate([prompts] if alone else prompts, sampling_params, self._completion)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one chat or several, each a list of messages with role and content. Otherwise as `generate`.

        The model's chat template writes the prompt; chat_template_kwargs are further variables of it.
        continue_final_message: continue the last message; needs add_generation_prompt=False.
        """
        alone = messages and isinstance(messages[0], Mapping)
        shared = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template_kwargs": None if chat_template_kwargs is None else dict(chat_template_kwargs),
        }

        async def plan(chat: Any, body: dict[str, Any]) -> tuple[str, Plan]:
            top = body.pop("logprobs", None)
            asked = {**body, **shared, "messages": chat, "logprobs": top is not None, "top_logprobs": top}
            found = await self._planner.plan(read(ChatRequest, asked), client="")
            return self._tokenizer.decode(found.prompts[0], skip_special_tokens=False), found

        return self._generate([messages] if alone else messages, sampling_params, plan)

    def close(self) -> None:
        """Stop the engine and its threads. Calls that still run raise WorkerUnavailableError."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _completion(self, prompt: Prompt, body: dict[str, Any]) -> tuple[str | None, Plan]:
        plan = await self._planner.plan(read(CompletionRequest, {**body, "prompt": prompt}), client="")
        return prompt if isinstance(prompt, str) else None, plan

    def _generate(
        self,
        prompts: Sequence[Any],
        sampling_params: Params,
        plan: Callable[[Any, dict[str, Any]], Coroutine[Any, Any, tuple[str | None, Plan]]],
    ) -> list[RequestOutput]:
        """plan: makes a plan of a prompt and the other fields of its request."""
        bodies = [self._body(each) for each in _one_each(sampling_params, len(prompts))]

        async def run() -> list[RequestOutput]:
            plans: Plans = []
            for number, (prompt, body) in enumerate(zip(prompts, bodies, strict=True)):
                with _about(number):
                    plans.append(await plan(prompt, body))
            return await self._run_all(plans)

        return self._host.wait(run())

    def _body(self, params: SamplingParams | None) -> dict[str, Any]:
        body = {"max_tokens": DEFAULT_COMPLETION_TOKENS} if params is None else params.body()
        if self._random is not None and body.get("seed") is None:
            body["seed"] = self._random.getrandbits(64)
        return body

    async def _run_all(self, plans: Plans) -> list[RequestOutput]:
        """Generate all that is planned; the first error ends the others."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._run(number, *each)) for number, each in enumerate(plans)]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _run(self, number: int, text: str | None, plan: Plan) -> RequestOutput:
        params = sampling_from_proto(plan.wire[0])
        grammar = await self._grammars.get(params.grammar, "")
        request = EngineRequest(str(next(self._numbers)), tuple(plan.prompts[0]), params, grammar=grammar)
        collector = Collector(plan, text)
        async with self._places:
            with _about(number):
                events = self._events.open(self._engine, request)
            try:
                async for event in events:
                    collector.take(event)
            finally:
                events.close()
        return collector.result


class _Host:
    """The loop's thread, and the order in which engine and loop stop. Holds no reference to the LLM, which may go."""

    def __init__(self, loop: asyncio.AbstractEventLoop, engine: Engine, checker: Checker) -> None:
        self._loop, self._engine, self._checker = loop, engine, checker
        self._ends = asyncio.Event()
        self._entry, self._closed = threading.Lock(), False
        self._thread = threading.Thread(target=self._serve, name="llm", daemon=True)
        self._thread.start()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Do `work` on the loop. If the caller is interrupted, the work is cancelled."""
        with self._entry:  # so that nothing reaches the loop after its end
            if self._closed:
                work.close()
                raise WorkerUnavailableError("this LLM is closed; make another one")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise WorkerUnavailableError("the LLM was closed while it generated") from None
        finally:
            future.cancel()

    def end(self) -> None:
        """Stop the engine, which fails the requests that still run, then the loop."""
        with self._entry:
            self._closed = True
        self._engine.stop()
        self._loop.call_soon_threadsafe(self._ends.set)
        self._thread.join()

    def _serve(self) -> None:
        """Not by asyncio.Runner: its end starts a thread, and at the interpreter's end none can be had."""
        self._loop.run_until_complete(self._until_end())
        self._loop.close()

    async def _until_end(self) -> None:
        await self._ends.wait()
        await self._checker.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


@contextmanager
def _about(number: int) -> Iterator[None]:
    """Name the prompt in an error."""
    try:
        yield
    except InvalidRequestError as error:
        raise type(error)(f"prompt {number}: {error}", param=error.param) from None


def _one_each(params: Params, prompts: int) -> Sequence[SamplingParams | None]:
    """One entry for each prompt."""
    if params is None or isinstance(params, SamplingParams):
        return [params] * prompts
    wrong = next((each for each in params if not isinstance(each, SamplingParams)), None)
    if wrong is not None:
        raise InvalidRequestError(f"sampling_params has {wrong!r}; give kvrail.SamplingParams", param="sampling_params")
    if len(params) != prompts:
        raise InvalidRequestError(
            f"sampling_params has {len(params)} entries for {prompts} prompts; give one for all, or one for each",
            param="sampling_params",
        )
    return params
