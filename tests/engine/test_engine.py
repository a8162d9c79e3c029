"""The control plane against a machine whose output depends on every page (page_machine.py)."""

import threading

import pytest

from kvrail.engine.batch.batch import NOT_DRAWN, SampleRow, SequenceSlice
from kvrail.engine.request.events import Admitted, Failed, Finished, Output, Prefilled, PrefillStarted
from kvrail.engine.request.requests import EngineRequest, Resumed
from kvrail.engine.schedule.chunks import StepBudget
from kvrail.errors import ContextLengthError, InvalidRequestError, KvrailError, OverloadedError
from kvrail.values.sampling import FinishReason, SamplingParams
from tests.engine.bench import Bench, prompts
from tests.engine.page_machine import FirstIndexShift, PageMachine, expected


@pytest.mark.parametrize("budget", [1, 3, 16, 64])
def test_chunked_prefill_and_decode_together(budget):
    bench = Bench(num_pages=200, max_batch_tokens=budget)
    asked = prompts(12)
    for number, prompt in enumerate(asked):
        bench.submit(str(number), prompt)
    bench.run()
    for number, prompt in enumerate(asked):
        assert bench.tokens(str(number)) == expected(prompt, 8)
        assert isinstance(bench.events[str(number)][-1], Finished)
    assert max(sum(step) for step in bench.machine.steps) <= budget
    assert bench.engine.status().pages.used == 0


def test_decoding_is_never_stalled_by_a_prompt():
    bench = Bench(num_pages=200, max_batch_tokens=8)
    bench.submit("talker", [1, 2], max_tokens=20)
    bench.engine.step()
    bench.submit("reader", [3] * 60, max_tokens=1)
    bench.run()
    decoding = [step for step in bench.machine.steps if len(step) == 2]
    assert decoding and all(1 in step for step in decoding)
    assert bench.tokens("talker") == expected([1, 2], 20)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preemption_recomputes_and_starves_no_request(prefix_cache):
    bench = Bench(num_pages=12, prefix_cache=prefix_cache, max_batch_tokens=64)
    asked = prompts(10, longest=12, seed=3)
    for number, prompt in enumerate(asked):
        bench.submit(str(number), prompt, max_tokens=24)
    bench.run()
    assert bench.scheduler.preemptions > 0
    told = "kvrail_engine_sequence_preemptions"
    values = {
        name: bench.registry.get_sample_value(f"{told}_{name}", {"model_name": "machine"}) for name in ("sum", "count")
    }
    assert values == {"sum": bench.scheduler.preemptions, "count": len(bench.events)}
    for number, prompt in enumerate(asked):
        assert bench.tokens(str(number)) == expected(prompt, 24)


def test_first_come_first_served():
    bench = Bench(num_pages=10, max_running=8)
    bench.submit("big", [1] * 30, max_tokens=8)
    bench.submit("bigger", [2] * 30, max_tokens=8)
    bench.submit("small", [3], max_tokens=1)
    bench.engine.step()
    assert bench.of("big", Admitted) and not bench.of("bigger", Admitted) and not bench.of("small", Admitted)
    bench.run()
    assert bench.tokens("bigger") == expected([2] * 30, 8)


def test_prefix_hits_skip_work_and_change_nothing():
    bench = Bench(num_pages=64, max_batch_tokens=64)
    prompt = list(range(30))
    bench.submit("cold", prompt)
    bench.run()
    computed = sum(map(sum, bench.machine.steps))
    bench.submit("warm", prompt)
    bench.run()
    assert bench.tokens("warm") == bench.tokens("cold") == expected(prompt, 8)
    assert bench.of("warm", Admitted)[0].cached_tokens == 28  # whole pages, and one token is left to compute
    assert sum(map(sum, bench.machine.steps)) - computed == 30 - 28 + 7


def test_one_token_of_a_fully_cached_prompt_is_computed():
    bench = Bench(num_pages=64, max_batch_tokens=64)
    prompt = list(range(32))
    bench.submit("cold", prompt)
    bench.run()
    computed = sum(map(sum, bench.machine.steps))
    for name in ("warm", "as well"):
        bench.submit(name, prompt, max_tokens=4)  # together: each has a copy of the last page
    bench.run()
    for name in ("warm", "as well"):
        assert bench.tokens(name) == expected(prompt, 4)
        assert bench.of(name, Admitted)[0].cached_tokens == 31
    assert sum(map(sum, bench.machine.steps)) - computed == 2 * 4
    bench.submit("aborted", prompt)
    bench.engine.abort("aborted")
    bench.engine.check()


def test_a_prompt_that_fills_the_whole_pool_is_served_twice():
    bench = Bench(num_pages=8, max_batch_tokens=64)
    prompt = list(range(32))
    for name in ("cold", "warm"):
        bench.submit(name, prompt, prefill_only=True)
        lease = bench.engine.claim_lease(name)
        bench.run()
        bench.engine.release_lease(lease)
        assert [token.token_id for token in bench.of(name, Prefilled)[0].tokens] == expected(prompt, 1)
    assert bench.of("warm", Admitted)[0].cached_tokens == 28


@pytest.mark.parametrize("ahead", [False, True])
def test_n_sequences_compute_the_prompt_once(ahead):
    bench = Bench(num_pages=64, max_batch_tokens=64, ahead=ahead)
    bench.submit("three", list(range(23)), n=3, max_tokens=8)
    bench.run()
    for index in range(3):
        assert bench.tokens("three", index) == expected(range(23), 8, index)
    assert sum(map(sum, bench.machine.steps)) == 23 + 3 * 7


@pytest.mark.parametrize("ahead", [False, True])
def test_one_of_the_sequences_that_begin_later_computes_the_end_of_the_prompt(ahead):
    """Those that had no place end before the last two of six begin."""
    bench = Bench(num_pages=64, max_batch_tokens=64, max_running=4, ahead=ahead)
    bench.submit("six", list(range(23)), n=6, max_tokens=8)
    bench.run()
    for index in range(6):
        assert bench.tokens("six", index) == expected(range(23), 8, index)
    assert sum(map(sum, bench.machine.steps)) == 23 + 6 * 7 + 23 % 4


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("prompt", "prefix_cache"), [(range(3), True), (range(3), False), (range(23), False)])
def test_preempted_sequences_copy_the_end_of_the_prompt_once(ahead, prompt, prefix_cache):
    """They lose their pages to an older request, and its pages are theirs when it ends."""
    bench = Bench(num_pages=20, max_batch_tokens=8, ahead=ahead, prefix_cache=prefix_cache)
    bench.submit("older", [50] * 8, max_tokens=22)
    bench.step(1)
    bench.submit("three", prompt, n=3, max_tokens=30)
    bench.run()
    assert bench.scheduler.preemptions
    for index in range(3):
        assert bench.tokens("three", index) == expected(prompt, 30, index)


@pytest.mark.parametrize("n", [1, 3])
def test_remote_kv(n):
    bench = Bench(num_pages=64)
    prompt = list(range(40, 61))
    bench.submit("r", prompt, remote=True, n=n)
    (admitted,) = bench.of("r", Admitted)
    assert admitted.awaits_kv and not bench.scheduler.has_work()
    lease = bench.engine.claim_lease("r")
    first = [FirstIndexShift().sample(one_hot(prompt), [row(i)])[0] for i in range(n)]
    with bench.engine.change() as requests:
        requests.receive_first_tokens("r", first)
    assert [bench.tokens("r", i) for i in range(n)] == [[t.token_id] for t in first]  # ahead of the KV
    bench.machine.write(lease.pages, 0, prompt)
    with bench.engine.change() as requests:
        requests.receive_kv("r")
    bench.engine.release_lease(lease)
    bench.run()
    for index in range(n):
        assert bench.tokens("r", index) == expected(prompt, 8, index)


def one_hot(prompt):
    machine = PageMachine(64, 4)
    return machine.execute([SequenceSlice(prompt, 0, range(20), 1)])


def row(index):
    return SampleRow(SamplingParams(max_tokens=8, temperature=0.0), index, 0, [], [])


@pytest.mark.parametrize("length", [21, 24, 25])
def test_lost_transfer_is_computed_here(length):
    bench = Bench(num_pages=64)
    prompt = list(range(length))
    bench.submit("r", prompt, remote=True)
    lease = bench.engine.claim_lease("r")
    with bench.engine.change() as requests:
        requests.receive_first_tokens("r", FirstIndexShift().sample(one_hot(prompt), [row(0)]))
    with bench.engine.change() as requests:
        requests.compute_here("r")
    bench.engine.release_lease(lease)
    bench.run()
    assert bench.tokens("r") == expected(prompt, 8)


def test_pages_of_a_dropped_transfer_wait_for_its_writer():
    bench = Bench(num_pages=8)
    bench.submit("r", [1] * 20, remote=True)
    lease = bench.engine.claim_lease("r")
    bench.engine.abort("r")
    assert bench.engine.claim_lease("r") is None
    assert bench.engine.status().pages.used == 5  # the writer may still be at it
    bench.submit("next", [2] * 20, max_tokens=1)
    assert not bench.of("next", Admitted)
    bench.engine.release_lease(lease)
    assert bench.of("next", Admitted)
    bench.run()


def test_chunks_are_smaller_beside_decodes():
    bench = Bench(num_pages=200, max_batch_tokens=40, mixed_batch_tokens=10, max_running=16)
    bench.submit("first", [1] * 60, max_tokens=30)
    bench.step(2)
    assert bench.machine.steps == [[40], [20]]  # nothing decodes
    for number in range(4):
        bench.submit(f"long {number}", [2 + number] * 20, max_tokens=30)
    bench.step(3)
    assert bench.machine.steps[2:] == [[1, 9], [1, 9], [1, 2, 7]]
    bench.run()
    assert bench.tokens("long 3") == expected([5] * 20, 30)


def test_chunks_advance_beside_any_number_of_decodes():
    bench = Bench(num_pages=200, max_batch_tokens=24, mixed_batch_tokens=8, max_running=16)
    for number in range(10):
        bench.submit(str(number), [number], max_tokens=30)
    bench.step(2)
    bench.submit("long", [7] * 9, max_tokens=3)
    bench.step(2)
    assert bench.machine.steps[2:] == [[1] * 10 + [2]] * 2


@pytest.mark.parametrize(
    ("others", "tokens"), [(0, 2048), (1, 511), (384, 128), (400, 128), (1000, 128), (2000, 48), (2048, 0)]
)
def test_tokens_of_chunks_beside_others(others, tokens):
    assert StepBudget(2048, 64, 64, mixed_batch_tokens=512).chunk_tokens(others, beside=others > 0) == tokens
    assert StepBudget(2048, 64, 64).chunk_tokens(others, beside=True) == 2048 - others
    small, others = StepBudget(256, 64, 64, mixed_batch_tokens=512), min(others, 256)
    assert small.chunk_tokens(others, beside=True) == 256 - others


def test_prompts_beside_sequences_that_await_kv_come_in_chunks():
    bench = Bench(num_pages=64, max_batch_tokens=40, mixed_batch_tokens=8)
    bench.submit("elsewhere", [3] * 9, remote=True)
    bench.submit("here", [7] * 30, max_tokens=2)
    bench.run()
    assert bench.machine.steps == [[8], [8], [8], [6], [1]]  # though nothing decodes yet


def test_short_remote_prompts_are_computed_here():
    bench = Bench(num_pages=64)
    bench.submit("short", [1] * 8, remote=True, local_tokens=8)
    bench.submit("long", [2] * 9, remote=True, local_tokens=8)
    assert not bench.of("short", Admitted)[0].awaits_kv and bench.of("long", Admitted)[0].awaits_kv
    bench.run()
    assert bench.tokens("short") == expected([1] * 8, 8)
    bench.engine.abort("long")  # its lease was never claimed and returns with it
    bench.engine.check()


class Written:
    def __init__(self):
        self.written = []

    def begin(self, written):
        def layer_written(layer):
            assert layer == 0
            self.written.extend(written)

        return layer_written


def test_prefill_only_reports_pages_as_they_fill():
    listener = Written()
    bench = Bench(num_pages=64, max_batch_tokens=10, listener=listener)
    bench.submit("p", list(range(25)), prefill_only=True, n=2)
    bench.run()
    pages = [page for w in listener.written for page in range(w.first_page, w.end_page)]
    assert pages == list(range(7))
    (done,) = bench.of("p", Prefilled)
    assert [t.token_id for t in done.tokens] == [expected(range(25), 1, 0)[0], expected(range(25), 1, 1)[0]]
    lease = bench.engine.claim_lease("p")
    assert bench.machine.read(lease.pages, 25) == list(range(25))
    bench.engine.release_lease(lease)
    bench.engine.check()


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_prompt_that_a_transfer_reads_keeps_its_pages(prefix_cache):
    """A worker of both roles: older sequences outgrow the pool while it computes prompts for another worker."""
    bench = Bench(num_pages=16, max_batch_tokens=6, prefix_cache=prefix_cache)
    talkers, asked = [[1, 2, 3], [4, 5, 6], [7, 8, 9]], list(range(25))
    for number, prompt in enumerate(talkers):
        bench.submit(str(number), prompt, max_tokens=24)
    bench.step(4)
    bench.submit("asked", asked, prefill_only=True)
    bench.step(1)
    lease = bench.engine.claim_lease("asked")
    bench.run()
    assert bench.scheduler.preemptions > 0
    assert bench.of("asked", Prefilled) and bench.machine.read(lease.pages, 25) == asked
    assert [bench.tokens(str(number)) for number in range(3)] == [expected(prompt, 24) for prompt in talkers]
    bench.engine.release_lease(lease)
    bench.engine.check()


@pytest.mark.parametrize("ahead", [False, True])
def test_a_row_that_cannot_be_drawn_fails_its_request_and_no_other(ahead):
    bench = Bench(ahead=ahead, num_pages=64)
    names = {"a": [1, 2, 3], "broken": [4, 5], "b": [6]}
    for name, prompt in names.items():
        bench.submit(name, prompt, max_tokens=20)
    bench.step(4)
    begin, shot = bench.engine._sampler.begin, []

    def undrawn(logits, rows, masks=None, drawn=None):
        drawing = begin(logits, rows, masks, drawn)
        for i, asked in enumerate(rows):
            if list(asked.prompt_ids) == [4, 5] and asked.position == 10:
                drawing.tokens[i] = drawing.known[i] = NOT_DRAWN
                shot.append(asked)
        return drawing

    bench.engine._sampler.begin = undrawn
    bench.run()
    (failed,) = bench.of("broken", Failed)
    assert shot and "finite logits" in str(failed.error)
    assert bench.tokens("broken") == expected([4, 5], 8)
    for name in "ab":
        assert bench.tokens(name) == expected(names[name], 20)
    assert bench.engine.status().pages.used == 0 and bench.engine.status().healthy


class Pausing:
    """A lock that holds one thread up each time it has released it."""

    def __init__(self, lock):
        self.lock, self.thread = lock, None
        self.released, self.go_on = threading.Event(), threading.Event()

    def __enter__(self):
        self.lock.__enter__()

    def __exit__(self, *error):
        self.lock.__exit__(*error)
        if threading.current_thread() is self.thread:
            self.released.set()
            assert self.go_on.wait(10)

    def notify(self):
        self.lock.notify()


def test_events_come_in_the_order_of_the_changes():
    bench = Bench(num_pages=64)
    lock = bench.engine._changed = Pausing(bench.engine._changed)
    lock.thread = threading.Thread(target=bench.submit, args=("r", [1, 2, 3]), kwargs={"prefill_only": True})
    lock.thread.start()
    assert lock.released.wait(10)  # it is admitted, and no event was delivered
    bench.step(2)
    lock.go_on.set()
    lock.thread.join()
    assert [type(event) for event in bench.events["r"]] == [Admitted, PrefillStarted, Prefilled]


def test_a_failing_step_fails_its_requests_and_nothing_else():
    bench = Bench()
    bench.submit("a", [1, 2, 3])
    execute, bench.machine.execute = bench.machine.execute, lambda *a: (_ for _ in ()).throw(RuntimeError("device"))
    bench.engine.step()
    (failed,) = bench.of("a", Failed)
    assert isinstance(failed.error, KvrailError) and bench.engine.status().pages.used == 0
    bench.machine.execute = execute
    bench.submit("b", [1, 2, 3])
    bench.run()
    assert bench.tokens("b") == expected([1, 2, 3], 8)


def test_limits_are_enforced_with_clear_errors():
    bench = Bench(num_pages=8, max_waiting=1)
    with pytest.raises(InvalidRequestError, match="prompt is empty"):
        bench.submit("a", [])
    with pytest.raises(InvalidRequestError, match="token id 101 is outside the vocabulary of 101"):
        bench.submit("a", [1, 101])
    with pytest.raises(InvalidRequestError, match="logit_bias names token id 500") as caught:
        params = SamplingParams(max_tokens=1, logit_bias={500: 1.0})
        bench.engine.submit(EngineRequest("a", (1,), params))
    assert caught.value.param == "logit_bias"
    with pytest.raises(ContextLengthError, match="prompt has 120 tokens; the model's context is 120"):
        bench.submit("a", [1] * 120)
    with pytest.raises(ContextLengthError, match="make up to 41 tokens; this worker's KV cache holds 32"):
        bench.submit("a", [1] * 33)
    bench.submit("a", [1] * 20)
    bench.submit("b", [2] * 20)
    with pytest.raises(OverloadedError, match="1 requests are waiting"):
        bench.submit("c", [3] * 20)
    bench.run()
    bench.submit("d", [4])
    with pytest.raises(InvalidRequestError, match="'d' is in use"):
        bench.submit("d", [1])
    bench.run()
    assert bench.tokens("b") == expected([2] * 20, 8)


@pytest.mark.parametrize("done", [90, 99, 100, 5000])
def test_output_that_is_resumed_counts_towards_the_context(done):
    """The output of a sequence that has ended does not: it is not computed again."""
    bench = Bench(num_pages=40, max_running=4)
    params = SamplingParams(max_tokens=10**6, n=2)

    def submit(name, *resumed):
        bench.engine.submit(EngineRequest(name, (1,) * 20, params, resumed=resumed))

    submit("long before", Resumed((1,) * 90), Resumed((1,) * done, ended=True))
    if done < 100:
        submit("a", Resumed((1,) * done), Resumed(()))
    else:
        with pytest.raises(ContextLengthError, match=f"resumed output have {20 + done} tokens; .* context is 120"):
            submit("a", Resumed((1,) * done), Resumed(()))
    bench.run()


def test_the_context_ends_a_sequence():
    bench = Bench(num_pages=64)
    bench.submit("a", [1] * 115, max_tokens=50)
    bench.run()
    assert len(bench.tokens("a")) == 5
    assert bench.of("a", Output)[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("ahead", [False, True])
def test_what_was_to_be_computed_here_still_is_once_it_has_lost_its_cached_prefix(ahead):
    """Nobody would send its KV: that it awaits none was reported once, at its first admission."""
    bench = Bench(num_pages=16, ahead=ahead, mixed_batch_tokens=2)
    shared, old = list(range(1, 17)), [50, 51, 52, 53, 54]
    bench.submit("shared", shared, 1)
    bench.run()
    bench.submit("old", old, 50)
    while len(bench.tokens("old")) < 26:
        bench.step(1)
    late = [*shared, *range(20, 30)]
    bench.submit("late", late, 4, remote=True, local_tokens=10)
    bench.run()
    assert bench.scheduler.preemptions
    assert bench.events["late"][0] == Admitted(16, awaits_kv=False)
    assert bench.tokens("late") == expected(late, 4) and bench.tokens("old") == expected(old, 50)
