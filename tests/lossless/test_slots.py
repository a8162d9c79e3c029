"""Pages that are closed while requests of all kinds come and go: no token changes, no slot is lost."""

import random

import pytest

from kvrail.engine.request.events import Admitted, Failed
from tests.engine.bench import Bench, Transfer
from tests.engine.page_machine import VOCAB, expected
from tests.lossless.slotted import SlottedCells, pages_in


def bench_of(num_pages, open_pages, odd=0.0, seed=0, **limits):
    cells = SlottedCells(num_pages, open_pages, 4, odd, seed)
    return Bench(num_pages, slotted=cells, **limits), cells


def prompt_of(length, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def test_closed_pages_serve_the_next_prompt_and_make_room() -> None:
    """More tokens are cached than open slots could hold."""
    bench, cells = bench_of(60, 12)
    asked = [prompt_of(40, seed) for seed in range(4)]
    for number, prompt in enumerate(asked):
        bench.submit(f"first {number}", prompt, 3)
        bench.run()
    assert sum(map(cells.slots.is_closed, range(60))) == 40
    for number, prompt in enumerate(asked):
        bench.submit(f"again {number}", prompt, 3)
        bench.run()
        assert bench.of(f"again {number}", Admitted)[0].cached_tokens == 39
        assert bench.tokens(f"again {number}") == expected(prompt, 3)
    assert cells.copied_closed == 4  # the last page of each prompt, which was computed once more in a page of its own


def test_a_sequence_may_have_as_many_pages_as_open_slots() -> None:
    bench, _ = bench_of(60, 12, odd=1.0)
    bench.submit("longest", prompt_of(40), 8)
    bench.run()
    assert bench.tokens("longest") == expected(prompt_of(40), 8)
    with pytest.raises(Exception, match="holds 48"):
        bench.submit("longer", prompt_of(40), 9)


def test_pages_keep_their_form_while_a_transfer_has_them() -> None:
    bench, cells = bench_of(60, 30)
    prompt = prompt_of(40)
    bench.submit("sent", prompt, 1, prefill_only=True)
    lease = None
    while not bench.of("sent", Admitted):
        bench.step(1)
    lease = bench.engine.claim_lease("sent")
    bench.run()
    assert not any(pages_in(cells, lease.pages))
    bench.engine.release_lease(lease)
    bench.run()
    assert all(pages_in(cells, lease.pages))
    bench.submit("again", prompt, 1, prefill_only=True)
    bench.step(1)
    lease = bench.engine.claim_lease("again")
    assert pages_in(cells, lease.pages) == [True] * 9 + [False]
    bench.run()
    bench.engine.release_lease(lease)
    bench.run()


def test_what_a_transfer_brings_is_closed_once_it_is_exact() -> None:
    bench, cells = bench_of(60, 30)
    prompt = prompt_of(42)
    bench.submit("received", prompt, 12, remote=True)
    bench.step(1)
    transfer = Transfer(bench, "received", prompt)
    transfer.first()
    transfer.coarse()
    bench.step(3)  # drafts
    assert cells.closings == 0
    transfer.exact()
    bench.run()
    assert bench.tokens("received") == expected(prompt, 12) and cells.closings >= 10


def test_a_page_behind_one_that_stays_open_stays_open() -> None:
    bench, cells = bench_of(60, 30, odd=0.3, seed=3)
    for seed in range(12):
        bench.submit(str(seed), prompt_of(48, seed), 4)
        bench.run()
    assert cells.failures and cells.slots.stuck > cells.failures


@pytest.mark.parametrize("seed", range(6))
def test_pages_that_were_evicted_are_computed_again_before_others_that_were_not(seed: int) -> None:
    bench, cells = bench_of(26, 18, 0.02 * (seed % 2), seed, max_running=4)
    rng = random.Random(seed)
    base, asked = prompt_of(40), {}
    for number in range(150):
        prompt = [*base[: rng.randint(0, 40)], *prompt_of(rng.randint(1, 12), seed=rng.randrange(10))]
        asked[str(number)] = prompt
        remote = rng.random() < 0.2
        bench.submit(str(number), prompt, rng.randint(2, 6), prefill_only=remote)
        bench.step(rng.randint(0, 8))
        if remote and (lease := bench.engine.claim_lease(str(number))):
            bench.step(rng.randint(0, 4))
            bench.engine.release_lease(lease)
    for name in asked:
        if lease := bench.engine.claim_lease(name):
            bench.engine.release_lease(lease)
    bench.run()
    for name, prompt in asked.items():
        tokens = bench.tokens(name)
        assert tokens == expected(prompt, len(tokens))
    assert not any(bench.of(name, Failed) for name in asked) and cells.closings > 50
