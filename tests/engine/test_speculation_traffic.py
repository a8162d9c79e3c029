"""Requests of mixed stages, with random cancellations and losses, over fewer pages than they need at once."""

import random

import pytest

from kvrail.engine.request.events import Admitted, Failed, Finished, Verified
from tests.engine.bench import Bench, Transfer, prompts
from tests.engine.page_machine import expected

AT_ONCE = 16


class Traffic:
    """Submits requests and reports on transfers in any possible order, between steps and while one computes."""

    def __init__(self, bench: Bench, seed: int, transfer: type[Transfer] = Transfer) -> None:
        self.bench = bench
        self._transfer = transfer
        self.rng = random.Random(seed)
        self.prompts: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}
        self.transfers: dict[str, Transfer | None] = {}  # None: it has ended, or never was
        bench.machine.meanwhile = lambda: self.news() if self.rng.random() < 0.5 else None

    def ask(self, prompt: list[int]) -> None:
        name, rng = str(len(self.prompts)), self.rng
        self.prompts[name], self.lengths[name] = prompt, rng.randint(2, 40)
        remote, provisional = rng.random() < 0.8, rng.random() < 0.5
        self.bench.submit(name, prompt, self.lengths[name], remote=remote, provisional=provisional)

    def news(self) -> None:
        for name in [name for name in self.prompts if name not in self.transfers]:
            admitted = self.bench.of(name, Admitted)
            if admitted:
                self.transfers[name] = self._begin(name) if admitted[0].awaits_kv else None
        for name, transfer in self.transfers.items():
            if transfer is not None and self.rng.random() < 0.2 and self._ends(transfer):
                self.transfers[name] = None

    def run(self, at_most: int) -> None:
        """Step until at most `at_most` requests are left."""
        scheduler = self.bench.scheduler
        while scheduler.num_running + scheduler.num_waiting > at_most:
            self.news()
            self.bench.step(1)

    def cancel_one(self) -> None:
        """Cancel a request for which no transfer writes."""
        names = [name for name, transfer in self.transfers.items() if transfer is None]
        self.bench.engine.abort(self.rng.choice(names or ["nobody"]))

    def _begin(self, name: str) -> Transfer:
        transfer = self._transfer(self.bench, name, self.prompts[name])
        transfer.first()
        return transfer

    def _ends(self, transfer: Transfer) -> bool:
        draw = self.rng.random()
        if draw < 0.3:
            transfer.coarse(wrong=self.rng.random() < 0.5)
        elif draw < 0.45:
            with self.bench.engine.change() as requests:
                requests.drop_drafts(transfer.name)
        elif draw < 0.6:
            self.bench.machine.cells[transfer.lease.pages[-1], 0] += 1  # another stage's frame, while drafts read
        elif draw < 0.85:
            transfer.exact()
        elif draw < 0.95:
            transfer.lose()
        else:
            self.bench.engine.abort(transfer.name)
            transfer.release()
        return draw >= 0.6


@pytest.mark.parametrize("launches_async", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_nothing_leaks_and_no_request_starves(seed: int, launches_async: bool) -> None:
    bench = Bench(num_pages=70, max_running=AT_ONCE, max_batch_tokens=48)
    bench.machine.launches_async = launches_async
    traffic = Traffic(bench, seed)
    (shared,) = prompts(1, 20)
    for prompt in prompts(130, longest=40, seed=seed):
        traffic.ask([*shared[: traffic.rng.randint(0, 20)], *prompt])
        traffic.run(at_most=AT_ONCE - 1)
        if traffic.rng.random() < 0.1:
            traffic.cancel_one()
    traffic.run(at_most=0)
    bench.run()
    assert bench.engine.status().pages.used == 0
    ended = [name for name in traffic.prompts if bench.of(name, Finished)]
    assert len(ended) > 30 and not any(bench.of(name, Failed) for name in traffic.prompts)
    for name, prompt in traffic.prompts.items():
        tokens = bench.tokens(name)
        assert tokens == expected(prompt, len(tokens))
        assert name not in ended or len(tokens) == traffic.lengths[name]
    verdicts = [event for name in traffic.prompts for event in bench.of(name, Verified)]
    assert any(v.accepted == v.proposed for v in verdicts) and any(v.accepted == 0 for v in verdicts)
    assert bench.scheduler.preemptions > 0
