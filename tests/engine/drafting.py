"""A decode engine over a tiny model whose prompts are computed by another runner and arrive coarse first."""

import functools
from collections.abc import Callable

import torch
from prometheus_client import CollectorRegistry

from kvrail.engine.batch.batch import SampleRow, SequenceSlice
from kvrail.engine.engine import Engine
from kvrail.engine.kv.leases import PageLease
from kvrail.engine.kv.pages import PagePool
from kvrail.engine.model.loader import LoadedModel, load_model
from kvrail.engine.request.events import Admitted, Drafted, Event, Finished, Output, Verified
from kvrail.engine.request.requests import EngineRequest, ModelLimits
from kvrail.engine.sampling.sampler import Sampler
from kvrail.engine.schedule.chunks import StepBudget
from kvrail.engine.schedule.scheduler import Scheduler
from kvrail.engine.step.runner import ModelRunner
from kvrail.telemetry.worker import EngineMetrics
from kvrail.text import Tokenizer, load_tokenizer
from kvrail.values.pagehash import page_hashes
from kvrail.values.sampling import SamplingParams
from tests.models import tiny_model

PAGE_SIZE = 16
Coarse = Callable[[torch.Tensor], torch.Tensor]
Pages = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of one prompt's pages: float32 [layers, pages, PAGE_SIZE, kv_heads, dim]."""


def exact(values: torch.Tensor) -> torch.Tensor:
    return values


def rounded(values: torch.Tensor) -> torch.Tensor:
    """Sign, exponent and two bits of mantissa."""
    return ((values.view(torch.int32) + (1 << 20)) & ~((1 << 21) - 1)).view(torch.float32)


def noise(values: torch.Tensor) -> torch.Tensor:
    return torch.randn(values.shape, generator=torch.Generator().manual_seed(3)) * values.std()


@functools.cache
def loaded(family: str, device: str = "cpu") -> tuple[LoadedModel, Tokenizer]:
    folder = str(tiny_model(family))
    options = {"device": device, "dtype": "float32", "kv_dtype": "float32", "load_format": "safetensors"}
    return load_model(folder, page_size=PAGE_SIZE, **options), load_tokenizer(folder)


class DecodeSite:
    """An engine stepped by hand, and its events."""

    def __init__(
        self,
        family: str = "llama",
        num_pages: int = 64,
        max_batch_tokens: int = 512,
        prompt_rows: int = 256,
        device: str = "cpu",
        **options: int,
    ) -> None:
        self.model, self.tokenizer = loaded(family, device)
        size = {"max_running": 16, "max_batch_tokens": max_batch_tokens}
        self.runner = ModelRunner(self.model, num_pages, compile=False, **size)
        if device != "cpu":
            self.runner.warm_up()  # captures
        self.sampler = Sampler(self.model.vocab_size, self.model.device)
        self.pool = PagePool(num_pages, PAGE_SIZE)
        self.events: dict[str, list[Event]] = {}
        self.engine = Engine(
            self.runner,
            self.sampler,
            Scheduler(self.pool, StepBudget(**size, max_waiting=99, prompt_rows=prompt_rows)),
            ModelLimits(self.model.vocab_size, self.model.max_model_len, self.model.eos_token_ids),
            self.tokenizer,
            EngineMetrics(CollectorRegistry(), "tiny"),
            self._deliver,
            **options,
        )

    def begin(self, name: str, prompt: list[int], params: SamplingParams, **options: bool) -> "Transfer":
        """Submit a remote request; its transfer."""
        self.engine.submit(EngineRequest(name, tuple(prompt), params, remote=True, **options))
        return Transfer(self, name, prompt, params)

    def run(self) -> None:
        while self.engine.pending():
            self.step(1)

    def step(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()
            self.engine.check()

    def of(self, name: str, kind: type) -> list:
        return [event for event in self.events[name] if isinstance(event, kind)]

    def answer(self, name: str) -> tuple[list[int], str, object, str, int]:
        """Tokens, text, finish reason, stop reason and the number of tokens that were counted."""
        outputs = self.of(name, Output)
        tokens = [token for output in outputs for token in output.token_ids]
        text = "".join(output.text for output in outputs)
        (finished,) = self.of(name, Finished)
        return tokens, text, outputs[-1].finish_reason, outputs[-1].stop_reason, finished.completion_tokens

    def logprobs(self, name: str) -> list:
        return [entry for output in self.of(name, Output) for entry in output.logprobs]

    def drafted(self, name: str) -> tuple[list[int], str]:
        drafts = self.of(name, Drafted)
        return [token for event in drafts for token in event.token_ids], "".join(event.text for event in drafts)

    def accepted(self, name: str) -> int:
        (verdict,) = self.of(name, Verified)
        return verdict.accepted

    def cached_pages(self, token_ids: list[int]) -> Pages:
        """The pages that the prefix cache would serve to a prompt that begins with these tokens."""
        found = self.pool.match(page_hashes(token_ids, PAGE_SIZE))
        return self.runner.cache.tensors["keys"][:, found].clone(), self.runner.cache.tensors["values"][
            :, found
        ].clone()

    def _deliver(self, events) -> None:
        for request_id, event in events:
            self.events.setdefault(request_id, []).append(event)


class Transfer:
    """One prompt's KV, computed elsewhere, on its way into the pages of one request."""

    def __init__(self, site: DecodeSite, name: str, prompt: list[int], params: SamplingParams) -> None:
        self.site, self.name = site, name
        lease = site.engine.claim_lease(name)
        assert lease is not None
        self.lease: PageLease = lease
        held = site.of(name, Admitted)[0].cached_tokens // PAGE_SIZE
        self.missing = list(lease.pages[held:])
        self.pages, logits = prefill(site.model, prompt)
        self.pages = self.pages[0][:, held:], self.pages[1][:, held:]
        banned = banned_first(site, params)
        rows = [SampleRow(params, index, len(prompt), prompt, [], banned) for index in range(params.n)]
        with site.engine.change() as requests:
            requests.receive_first_tokens(name, site.sampler.sample(logits.expand(len(rows), -1), rows))

    def write(self, form: Coarse) -> None:
        cache = self.site.runner.cache
        cache.tensors["keys"][:, self.missing] = form(self.pages[0])
        cache.tensors["values"][:, self.missing] = form(self.pages[1])

    def send_coarse(self, form: Coarse) -> None:
        self.write(form)
        with self.site.engine.change() as requests:
            requests.receive_coarse_kv(self.name)

    def send_exact(self) -> None:
        self.write(exact)
        with self.site.engine.change() as requests:
            requests.receive_kv(self.name)
        self.site.engine.release_lease(self.lease)

    def lose(self) -> None:
        with self.site.engine.change() as requests:
            requests.compute_here(self.name)
        self.site.engine.release_lease(self.lease)


def deliver(site: DecodeSite, transfers: list[Transfer], form: Coarse) -> None:
    """All transfers at once: drafts on one form of KV, then the exact one."""
    for transfer in transfers:
        transfer.send_coarse(form)
    site.run()
    for transfer in transfers:
        transfer.send_exact()
    site.run()


def banned_first(site: DecodeSite, params: SamplingParams) -> tuple[int, ...]:
    """Tokens that the prefill worker must not draw."""
    return (*params.stop_token_ids, *site.model.eos_token_ids) if params.min_tokens else ()


def prefill(model: LoadedModel, token_ids: list[int]) -> tuple[Pages, torch.Tensor]:
    """KV of a sequence in one step on fresh pages, and the logits behind its last token."""
    count = -(-len(token_ids) // PAGE_SIZE)
    runner = ModelRunner(model, count, max_running=1, max_batch_tokens=len(token_ids))
    logits = runner.execute([SequenceSlice(token_ids, 0, range(count), 1)])
    return (runner.cache.tensors["keys"], runner.cache.tensors["values"]), logits
