"""KV that is not finite leaves the prefix cache; a sequence that borrowed some computes all KV again."""

import pytest

from kvrail.engine.batch.batch import SampledToken
from kvrail.engine.request.events import Admitted, Failed, Finished, Prefilled, Recomputed, Verified
from kvrail.engine.request.requests import EngineRequest
from kvrail.values.pagehash import page_hashes
from kvrail.values.sampling import SamplingParams
from tests.engine.bench import Bench, Transfer
from tests.engine.page_machine import POISON, expected

PROMPT = list(range(30))


def poison(bench, pages):
    bench.machine.cells[list(pages)] = POISON


def poison_cached(bench):
    """All pages in the prefix cache."""
    poison(bench, bench.pool._hash_of)


def served_as_before(bench, name="later", cached=28):
    """The prompt is served, and then found in the cache."""
    for each, found in ((name, 0), (f"{name} again", cached)):
        bench.submit(each, PROMPT)
        bench.run()
        assert bench.tokens(each) == expected(PROMPT, 8)
        assert bench.of(each, Admitted)[0].cached_tokens >= found
    bench.pool.check()


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_kv_that_a_peer_sent_is_computed_here_again(ahead, n):
    bench = Bench(num_pages=64, max_batch_tokens=64, ahead=ahead)
    bench.submit("beside", [1, 2], max_tokens=20)
    bench.submit("asked", PROMPT, remote=True, n=n)
    bench.step(2)
    transfer = Transfer(bench, "asked", PROMPT)
    with bench.engine.change() as requests:
        requests.receive_first_tokens("asked", [SampledToken(expected(PROMPT, 1, i)[0]) for i in range(n)])
    poison(bench, transfer.lease.pages)
    with bench.engine.change() as requests:
        requests.receive_kv("asked")
    transfer.release()
    bench.run()
    for index in range(n):
        assert bench.tokens("asked", index) == expected(PROMPT, 8, index)
    assert bench.of("asked", Recomputed) and isinstance(bench.events["asked"][-1], Finished)
    assert bench.tokens("beside") == expected([1, 2], 20)
    served_as_before(bench)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_cached_prefix_is_computed_again_and_leaves_the_cache(ahead):
    bench = Bench(num_pages=64, max_batch_tokens=64, ahead=ahead)
    bench.submit("first", PROMPT)
    bench.run()
    poison_cached(bench)
    longer = [*PROMPT, 5, 6, 7, 8, 9]
    for name, prompt in (("asked", longer), ("same", PROMPT[:28])):  # the second one copies its last page
        bench.submit(name, prompt)
    bench.run()
    for name, prompt in (("asked", longer), ("same", PROMPT[:28])):
        assert bench.tokens(name) == expected(prompt, 8)
        assert len(bench.of(name, Recomputed)) == 1
    known = bench.pool.match(page_hashes(longer, 4))
    assert len(known) == 8 and not (bench.machine.cells[known] == POISON).any()
    served_as_before(bench)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_cached_prefix_that_gives_no_finite_log_probabilities_is_computed_again(ahead):
    bench = Bench(ahead=ahead)
    bench.submit("first", PROMPT)
    bench.run()
    poison(bench, bench.pool.match(page_hashes(PROMPT, 4))[:1])
    scoring = SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=1)
    bench.engine.submit(EngineRequest("asked", tuple(PROMPT), scoring, scored=13))  # as one that another worker began
    bench.run()
    assert bench.of("asked", Admitted)[0].cached_tokens and len(bench.of("asked", Recomputed)) == 1
    assert bench.tokens("asked") == expected(PROMPT, 3)
    served_as_before(bench)


@pytest.mark.parametrize("ahead", [False, True])
def test_kv_that_was_computed_here_fails_and_leaves_the_cache(ahead):
    bench = Bench(num_pages=64, max_batch_tokens=64, ahead=ahead)
    bench.submit("asked", PROMPT, max_tokens=20)
    bench.step(4)
    poison_cached(bench)
    bench.run()
    (failed,) = bench.of("asked", Failed)
    assert "finite logits" in str(failed.error) and not bench.of("asked", Recomputed)
    assert bench.pool.counts().free == 64 and not len(bench.pool.events)
    served_as_before(bench)


@pytest.mark.parametrize("ahead", [False, True])
def test_all_sequences_of_a_request_fail_and_no_other(ahead):
    """One of them computed what the others borrowed, in whatever order they are found."""
    bench = Bench(num_pages=64, max_batch_tokens=64, ahead=ahead)
    bench.submit("beside", [1, 2], max_tokens=20)
    bench.submit("asked", PROMPT, max_tokens=20, n=7)
    bench.step(4)
    poison(bench, bench.pool.match(page_hashes(PROMPT, 4)))
    bench.run()
    assert bench.tokens("beside") == expected([1, 2], 20)
    assert isinstance(bench.events["asked"][-1], Failed)
    served_as_before(bench)


def test_kv_that_is_poisoned_again_fails_the_request():
    bench = Bench(num_pages=64, max_batch_tokens=64)
    bench.submit("first", PROMPT)
    bench.run()
    execute = bench.machine.execute

    def broken(slices, *rest):
        for piece in slices:
            poison(bench, piece.page_table)
        return execute(slices, *rest)

    bench.machine.execute = broken
    bench.submit("asked", PROMPT)
    bench.run()
    assert len(bench.of("asked", Recomputed)) == 1 and len(bench.of("asked", Failed)) == 1
    assert bench.pool.match(page_hashes(PROMPT, 4)) == [] and bench.pool.counts().used == 0


def test_a_prefill_worker_fails_since_its_pages_are_already_sent():
    bench = Bench(num_pages=64, max_batch_tokens=64)
    bench.submit("first", PROMPT)
    bench.run()
    poison_cached(bench)
    bench.submit("asked", PROMPT, prefill_only=True)
    lease = bench.engine.claim_lease("asked")
    bench.run()
    bench.engine.release_lease(lease)
    assert len(bench.of("asked", Failed)) == 1 and not bench.of("asked", Recomputed)
    bench.submit("later", PROMPT, prefill_only=True)
    lease = bench.engine.claim_lease("later")
    bench.run()
    bench.engine.release_lease(lease)
    assert [token.token_id for token in bench.of("later", Prefilled)[0].tokens] == expected(PROMPT, 1)


def test_drafts_are_withdrawn():
    bench = Bench(num_pages=64, max_batch_tokens=64)
    bench.submit("asked", PROMPT, remote=True, provisional=True)
    bench.step(1)
    transfer = Transfer(bench, "asked", PROMPT)
    transfer.first()
    transfer.coarse()
    bench.step(3)
    poison(bench, transfer.lease.pages[:1])
    with bench.engine.change() as requests:
        requests.receive_kv("asked")
    transfer.release()
    bench.run()
    assert bench.tokens("asked") == expected(PROMPT, 8)
    assert [event.accepted for event in bench.of("asked", Verified)] == [0] and bench.of("asked", Recomputed)


def test_an_aborted_request_is_not_computed_again():
    bench = Bench(num_pages=64, max_batch_tokens=64)
    bench.submit("first", PROMPT)
    bench.run()
    poison_cached(bench)
    bench.submit("asked", PROMPT)
    bench.machine.meanwhile = lambda: bench.engine.abort("asked")
    bench.run()
    assert not bench.of("asked", Recomputed) and bench.engine.status().pages.used == 0
