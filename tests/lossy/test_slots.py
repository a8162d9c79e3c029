"""Requests of all kinds over pages that lose bits: each says what it says alone, and no slot is lost."""

import random
import threading
from typing import Any

import pytest

from kvrail.engine.kv.fixed.slots import FixedSlots
from kvrail.engine.kv.pages import PagePool
from kvrail.engine.request.events import Admitted, Verified
from kvrail.engine.request.requests import Resumed
from kvrail.engine.request.sequence import Sequence
from kvrail.engine.schedule.lossy_tables import tables_of
from kvrail.values.sampling import SamplingParams
from tests.engine.page_machine import VOCAB
from tests.lossy.machine import LossyBench, LossyTransfer, spoken


def prompt_of(length, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("sent", [1, 3, 17, 30])
def test_resumed_outputs_read_what_they_read_before(sent: int, ahead: bool) -> None:
    """In chunks that end where what is read changes."""
    bench = LossyBench(60, 40, ahead=ahead, max_batch_tokens=64)
    for length in (3, 8, 13, 30):
        prompt, name = prompt_of(length, length), str(length)
        tokens = [spoken(prompt, 40, index) for index in range(2)]
        resumed = (Resumed(tuple(tokens[0][:sent])), Resumed(tuple(tokens[1][: sent + 2])))
        bench.submit(name, prompt, 40, n=2, resumed=resumed)
        bench.run()
        assert bench.tokens(name, 0) == tokens[0][sent:] and bench.tokens(name, 1) == tokens[1][sent + 2 :]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("length", [1, 4, 5, 12, 16, 18, 30])
def test_sequences_of_a_request_share_its_prompt(length: int, ahead: bool) -> None:
    """At once; and one by one, when the first has left what the others need open."""
    for places in (8, 2):
        bench = LossyBench(90, 50, seed=length, ahead=ahead, max_running=places)
        prompt = prompt_of(length, length)
        bench.submit("several", prompt, 30, n=5)
        bench.run()
        assert [bench.tokens("several", index) for index in range(5)] == [spoken(prompt, 30, i) for i in range(5)]


def received(bench: LossyBench, name: str, prompt: list[int], count: int) -> int:
    """A prompt that is sent here; how many of its tokens were cached."""
    bench.submit(name, prompt, count, remote=True)
    bench.step(1)
    transfer = LossyTransfer(bench, name, prompt)
    transfer.first()
    transfer.exact()
    bench.run()
    assert bench.tokens(name) == spoken(prompt, count)
    return transfer.held


def test_what_is_cached_closed_serves_prompts_that_are_sent_and_no_others() -> None:
    bench = LossyBench(60, 24)
    first, other = prompt_of(42, 3), prompt_of(70, 4)
    assert received(bench, "first", first, 10) == 0
    assert received(bench, "again", first, 10) == 40  # open slots are left, so that its last pages are still open
    assert received(bench, "other", other, 10) == 0
    assert received(bench, "longer", [*first, *prompt_of(12, 5)], 10) == 40
    assert received(bench, "takes most open slots", prompt_of(80, 6), 8) == 0
    assert received(bench, "other again", other, 10) == 64  # page 16 was to be open
    received(bench, "takes them again", prompt_of(80, 10), 8)
    bench.submit("here", [*other, 1], 10)
    bench.run()
    assert bench.tokens("here") == spoken([*other, 1], 10)
    assert bench.of("here", Admitted)[0].cached_tokens == 4  # a sequence's first page stays open


def test_pages_of_output_are_not_shared() -> None:
    """What follows in a chat is another prompt, whose KV no lossy page has touched."""
    bench = LossyBench(60, 40)
    prompt = prompt_of(30, 6)
    bench.submit("turn", prompt, 20)
    bench.run()
    longer = [*prompt, *bench.tokens("turn"), 5, 6, 7]
    bench.submit("next turn", longer, 20)
    bench.run()
    assert bench.tokens("next turn") == spoken(longer, 20)
    assert bench.of("next turn", Admitted)[0].cached_tokens <= 28


def test_a_lost_transfer_computes_a_prompt_that_began_closed_from_its_beginning() -> None:
    bench = LossyBench(60, 24)
    prompt = prompt_of(50, 7)
    received(bench, "sent", prompt, 10)
    received(bench, "other", prompt_of(70, 8), 4)
    bench.submit("lost", prompt, 30, remote=True)
    bench.step(1)
    transfer = LossyTransfer(bench, "lost", prompt)
    assert transfer.held
    transfer.first()
    transfer.coarse()
    bench.step(2)
    transfer.lose()
    bench.run()
    assert bench.tokens("lost") == spoken(prompt, 30)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_transfer_is_lost_while_a_step_drafts_in_its_pages(ahead: bool) -> None:
    """They are given to no other sequence before that step is over."""
    bench = LossyBench(60, 24, ahead=ahead)
    prompt, third = [*prompt_of(33, 7), *range(60, 69)], prompt_of(30, 9)
    bench.submit("first", prompt_of(40, 7), 24)
    bench.run()
    bench.submit("beside", [5, 6, 7], 60)
    bench.submit("lost", prompt, 12, remote=True)
    bench.step(2)
    transfer = LossyTransfer(bench, "lost", prompt)
    transfer.first()
    transfer.coarse()
    execute = bench.machine.execute

    def losing(*arguments: Any) -> Any:
        bench.machine.execute = execute
        transfer.release()
        with bench.engine.change() as requests:
            requests.compute_here("lost")
        bench.submit("third", third, 12)
        return execute(*arguments)

    bench.machine.execute = losing
    bench.run()
    for name, asked, count in (("beside", [5, 6, 7], 60), ("lost", prompt, 12), ("third", third, 12)):
        assert bench.tokens(name) == spoken(asked, count), name


def test_verified_drafts_end_with_their_page() -> None:
    bench = LossyBench(60, 40)
    prompt = prompt_of(9, 2)  # so short that drafts read what they will read when they are verified
    bench.submit("drafted", prompt, 30, remote=True)
    bench.step(1)
    transfer = LossyTransfer(bench, "drafted", prompt)
    transfer.first()
    transfer.coarse(wrong=False)
    bench.step(12)
    transfer.exact()
    bench.run()
    (verdict,) = bench.of("drafted", Verified)
    assert (verdict.proposed, verdict.accepted) == (2, 2)  # positions 10 and 11
    assert bench.tokens("drafted") == spoken(prompt, 30)


def test_a_sequence_that_waits_does_not_keep_the_engine_busy() -> None:
    """While pages are being closed there is no work; the closing is waited for."""
    bench = LossyBench(60, 40)
    bench.cells.polls = 1 << 60
    for name in ("one", "two"):
        bench.submit(name, prompt_of(38, 9), 12)
    bench.run(steps=100)
    assert bench.tokens("one") == bench.tokens("two") == spoken(prompt_of(38, 9), 12)


def test_a_sequence_that_takes_over_what_awaits_kv_reads_it_closed_too() -> None:
    bench = LossyBench(60, 24)
    prompt = prompt_of(50, 11)
    received(bench, "before", prompt, 4)
    first = [spoken(prompt, 1, index)[0] for index in range(2)]
    bench.submit("two", prompt, 30, n=2, remote=True, stop_token_ids=(first[0],))
    bench.step(1)
    transfer = LossyTransfer(bench, "two", prompt)
    assert transfer.held == 48
    transfer.report_first(*first)  # the first of the two ends with it
    transfer.exact()
    bench.run()
    assert bench.tokens("two", 1) == spoken(prompt, 30, 1)


def test_a_page_that_is_closed_alone_is_not_copied() -> None:
    """Another sequence of the request holds the end of the prompt in it, and reads it closed."""
    pool = PagePool(14, 4, slots=FixedSlots(14, 7))
    tables = tables_of(pool)
    one, other = (Sequence("r", index, SamplingParams(8, n=2), [*range(6)], 0, output_ids=[9]) for index in range(2))
    (fresh,) = tables.prefixes(one, [])
    tables.take(one, fresh)
    assert [prefix.copied for prefix in tables.prefixes(other, [])] == [None]
    for token in range(11):
        one.append(token)
    tables.extend(one, 18)
    one.computed = 17
    tables.publish(one)
    assert next(tables.prefixes(other, [one])).copied == one.page_table[1]
    assert not tables.ready(one, 17)
    pool.slots.choose(pool.slots.ready())
    pool.slots.settle([0, 0, 0])
    assert tables.ready(one, 17) and one.closed == 2
    assert next(tables.prefixes(other, [one])).copied == one.page_table[1]  # in both forms
    pool.allocate(3)
    assert [prefix.copied for prefix in tables.prefixes(other, [one])] == [None]
    pool.check()


def test_a_closing_is_enqueued_before_its_pages_can_be_freed() -> None:
    """A transfer that gets their slots writes behind what is enqueued then."""
    bench, free = LossyBench(60, 24, ahead=True), []
    lock, close = bench.engine._changed, bench.cells.close

    def closing(chosen: Any) -> Any:
        other = threading.Thread(target=lambda: free.append(lock.acquire(blocking=False)))
        other.start()
        other.join()
        return close(chosen)

    bench.cells.close = closing
    bench.submit("r", prompt_of(70), 20)
    bench.run()
    assert free and not any(free)
