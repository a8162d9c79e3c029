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
from kvrail.text import load_tokenizer
from kvrail.wire.convert import sampling_from_proto
from kvrail.worker.process import build_engine
from kvrail.worker.weights import forms_of

T = TypeVar("T")
Prompt = str | list[int]
Messages = Sequence[Mapping[str, Any]]
Params = SamplingParams | Sequence[SamplingParams] | None
Plans = list[tuple[str | None, Plan]]
"""For each prompt its text, if it has one, and what to generate."""


class LLM:
    """A model that generates in this process, for any number of threads at once.

    model: a local folder or a Hub name. seed: makes all that is drawn repeat, in the order of the calls; None: requests
    without a seed of their own draw one. options: a worker's settings (docs/configuration.md); device "auto", the
    default, is CUDA where torch finds a GPU, else the CPU. Raises ConfigError or UnsupportedModelError.

    `close` ends it, as do the end of a `with` block, of the object and of the interpreter.
    """

    def __init__(self, model: str, *, seed: int | None = None, **options: Unpack[Options]) -> None:
        settings = LLMSettings.of(model, options)
        tokenizer = load_tokenizer(model)
        defaults = defaults_of(RouterSettings.model_construct(model=model))
        loop = (loops.loop_factory() or asyncio.new_event_loop)()
        try:
            self._events = EventRouter(loop)
            loaded, _, self._engine = build_engine(
                settings, Registry(), self._events.deliver, tokenizer, weights=forms_of(settings)
            )
        except BaseException:
            loop.close()
            raise
        self._loop = loop
        self._tokenizer = tokenizer
        limits = Limits(loaded.max_model_len, min(loaded.vocab_size, tokenizer.vocab_size), frozenset(), frozenset())
        checker = Checker(tokenizer)
        shaper = Shaper(tokenizer, checker, tool_parser="none", reasoning_parser="none")
        self._planner = Planner(Encoder(tokenizer), shaper, lambda: limits, defaults)
        self._grammars = Grammars(lambda: tokenizer, loaded.eos_token_ids)
        self._places = asyncio.Semaphore(settings.max_waiting)
        self._numbers = itertools.count()
        self._random = None if seed is None else random.Random(seed)
        self._engine.start()
        self._host = _Host(loop, self._engine, checker)
        self._end = weakref.finalize(self, self._host.end)

    def generate(self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None) -> list[RequestOutput]:
        """Continue prompts, texts or token ids; what comes of each, in their order.

        sampling_params: of all prompts, or of each; None: the model's generation configuration, and 16 tokens. Raises
        InvalidRequestError or ContextLengthError, before anything is generated, where one of them cannot be served.
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
        """Answer one chat or several, each a list of messages with role and content, by the model's chat template.

        continue_final_message: go on with the last message; set add_generation_prompt to False with it. Otherwise as
        `generate`.
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
            found = await self._planner.chat(read(ChatRequest, asked), client="")
            return self._tokenizer.decode(found.prompts[0], skip_special_tokens=False), found

        return self._generate([messages] if alone else messages, sampling_params, plan)

    def close(self) -> None:
        """End the engine and give back what it holds. Calls that still run raise WorkerUnavailableError."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _completion(self, prompt: Prompt, body: dict[str, Any]) -> tuple[str | None, Plan]:
        plan = await self._planner.completion(read(CompletionRequest, {**body, "prompt": prompt}), client="")
        return prompt if isinstance(prompt, str) else None, plan

    def _generate(
        self,
        prompts: Sequence[Any],
        sampling_params: Params,
        plan: Callable[[Any, dict[str, Any]], Coroutine[Any, Any, tuple[str | None, Plan]]],
    ) -> list[RequestOutput]:
        """plan: makes one of a prompt and the other fields of its body."""
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
    """The thread of the loop, and the order in which engine and loop end. Does not know the LLM, which it outlives."""

    def __init__(self, loop: asyncio.AbstractEventLoop, engine: Engine, checker: Checker) -> None:
        self._loop, self._engine, self._checker = loop, engine, checker
        self._ends = asyncio.Event()
        self._entry, self._closed = threading.Lock(), False
        self._thread = threading.Thread(target=self._serve, name="llm", daemon=True)
        self._thread.start()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Do `work` on the loop. Where the caller is interrupted, so is the work."""
        with self._entry:  # the loop ends after all that came before
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
        """Stop the engine, which fails what still runs, then the loop."""
        with self._entry:
            self._closed = True
        self._engine.stop()
        self._loop.call_soon_threadsafe(self._ends.set)
        self._thread.join()

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._until_end())

    async def _until_end(self) -> None:
        await self._ends.wait()
        await self._checker.close()


@contextmanager
def _about(number: int) -> Iterator[None]:
    """Say of which prompt an error is."""
    try:
        yield
    except InvalidRequestError as error:
        raise type(error)(f"prompt {number}: {error}", param=error.param) from None


def _one_each(params: Params, prompts: int) -> Sequence[SamplingParams | None]:
    """Sampling of each of so many prompts."""
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
