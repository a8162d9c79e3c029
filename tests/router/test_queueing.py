"""The fair queue and the rate, on clocks and clients that a test moves."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrail.runtime.queueing import PATIENCE, FairQueue, Ticket, fair
from kvrail.services.router.fleet.prefixes import WorkerPages
from kvrail.services.router.generate.rates import LONGEST_S, SHORTEST_S, CompletionRate
from kvrail.services.router.http.clients import client_of
from kvrail.wire.v1 import common_pb2


class Room:
    """Places that tickets take, in the order that the queue gives them."""

    def __init__(self, places: int, share: float = 0.1) -> None:
        self.queue, self.places, self.held = FairQueue(share), places, []

    @property
    def free(self) -> int:
        return self.places - sum(ticket.places for ticket in self.held)

    def serve(self) -> list[Ticket]:
        granted: list[Ticket] = []
        while True:
            passed = []
            for ticket in self.queue.turns(self.free):
                if ticket.places <= self.free:
                    self.queue.granted(ticket, passed)
                    self.held.append(ticket)
                    granted.append(ticket)
                    break
                passed.append(ticket)
            else:
                return granted

    def end(self, ticket: Ticket) -> None:
        self.held.remove(ticket)
        self.queue.ended(ticket)


def test_a_lone_client_gets_every_place():
    room = Room(64)
    for _ in range(64):
        room.queue.add(Ticket("alone", 1, 100))
    assert len(room.serve()) == 64
    assert (len(room.queue), room.free) == (0, 0)


@pytest.mark.parametrize("newcomers", [1, 6])
def test_what_a_greedy_client_has_borrowed_goes_to_newcomers_as_it_ends(newcomers: int):
    room = Room(64)
    for _ in range(500):
        room.queue.add(Ticket("greedy", 1, 100))
    room.serve()
    for number in range(newcomers):
        room.queue.charge("greedy", 1)
        room.queue.add(Ticket(f"newcomer{number}", 1, 10_000))
    assert room.serve() == []
    for _ in range(newcomers):  # one end each, however long their prompts
        room.end(room.held[0])
        [ticket] = room.serve()
        assert ticket.client.startswith("newcomer")
    room.end(room.held[0])
    assert [ticket.client for ticket in room.serve()] == ["greedy"]


def test_clients_beyond_their_share_take_turns_by_what_they_were_served():
    room = Room(20)
    for _ in range(60):
        room.queue.add(Ticket("greedy", 1, 100))
    room.serve()
    for _ in range(60):
        room.queue.add(Ticket("other", 1, 100))
    for _ in range(60):
        room.end(room.held[0])
        assert len(room.serve()) == 1
    assert Counter(ticket.client for ticket in room.held) == {"greedy": 10, "other": 10}


@given(st.lists(st.integers(1, 9), min_size=2, max_size=5), st.integers(1, 40))
def test_clients_that_wait_get_equal_tokens(sizes: list[int], places: int):
    """However large their prompts: no two are further apart than the longest prompts of two turns."""
    room = Room(places, share=0.0)
    served: Counter[str] = Counter()
    for client, size in enumerate(sizes):
        for _ in range(400):
            room.queue.add(Ticket(str(client), 1, size * 100))
    for _ in range(200):
        for ticket in room.serve():
            served[ticket.client] += ticket.tokens
        room.end(room.held[0])
    totals = [served[str(client)] for client in range(len(sizes))]
    assert max(totals) - min(totals) <= 2 * 900


def test_nobody_saves_up_turns():
    room = Room(1, share=0.0)
    for _ in range(50):
        room.queue.add(Ticket("busy", 1, 1000))
        for ticket in room.serve():
            room.end(ticket)
    room.queue.add(Ticket("busy", 1, 1000))
    room.serve()
    for _ in range(20):
        room.queue.add(Ticket("busy", 1, 1000))
        room.queue.add(Ticket("late", 1, 1000))
    order = []
    for _ in range(20):
        room.end(room.held[0])
        order += [ticket.client for ticket in room.serve()]
    assert Counter(order) == {"busy": 10, "late": 10}


def test_priorities_count_within_a_client_and_what_came_back_is_first():
    room = Room(1, share=0.0)
    first, urgent, last = Ticket("a", 1, 1), Ticket("a", 1, 1, priority=-5), Ticket("a", 1, 1)
    for ticket in (first, urgent, last):
        room.queue.add(ticket)
    assert room.serve() == [urgent]
    room.end(urgent)
    assert room.serve() == [first]
    room.end(first)
    room.queue.put_back(first)
    late = Ticket("a", 1, 1, priority=-9)
    room.queue.add(late)
    order = []
    for _ in range(3):
        [ticket] = room.serve()
        order.append(ticket)
        room.end(ticket)
    assert order == [first, late, last]
    assert (len(room.queue), room.queue.clients) == (0, 0)


def test_many_sequences_find_room_in_the_end():
    room = Room(64, share=0.1)
    for number in range(64):
        room.queue.add(Ticket(f"other{number}", 1, 1))
    room.serve()
    large = Ticket("large", 56, 10)
    room.queue.add(large)
    served = 0
    while large not in room.held:
        room.queue.add(Ticket(f"more{served}", 1, 1))
        served += len(room.serve())
        room.end(next(ticket for ticket in room.held if ticket is not large))
        assert served <= 2 * PATIENCE + 64
    assert served >= PATIENCE


@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "end", "back"]), st.integers(0, 3), st.integers(1, 4))))
def test_the_books_of_the_queue(steps):
    room, waiting = Room(8), []
    for kind, number, places in steps:
        if kind == "add":
            waiting.append(Ticket(str(number), places, 10 * places))
            room.queue.add(waiting[-1])
        elif kind == "remove" and waiting:
            room.queue.remove(waiting.pop(number % len(waiting)))
        elif kind in ("end", "back") and room.held:
            ticket = room.held[number % len(room.held)]
            room.end(ticket)
            if kind == "back":
                room.queue.put_back(ticket)
                waiting.append(ticket)
        for ticket in room.serve():
            waiting.remove(ticket)
        assert len(room.queue) == len(waiting)
        assert room.queue.clients == len({ticket.client for ticket in waiting})
        assert room.free >= 0
    for ticket in list(room.held):
        room.end(ticket)
    for ticket in waiting:
        room.queue.remove(ticket)
    assert not (room.queue._waiting or room.queue._held or room.queue._served or room.queue._gone)


def test_fair_shares():
    held = [next(n for n in range(65) if not fair(n, 1, 64 - n, share)) for share in (0.0, 0.1, 0.5)]
    assert held == [64, 58, 32]
    alone = [next(h for h in range(n + 1) if not fair(h, 1, n - h, 0.1)) for n in (1, 2, 4, 8, 1024)]
    assert alone == [1, 2, 4, 7, 922]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_retry_after_is_what_the_queue_does():
    clock = Clock()
    rate = CompletionRate(clock)
    assert rate.retry_after(1) == SHORTEST_S  # nothing is known
    rate.ended(50)  # nobody waits: that says nothing
    rate.waiting(True)
    for _ in range(40):
        clock.now += 0.25
        rate.ended(1)
    assert rate.per_second == pytest.approx(4, rel=0.05)
    assert [rate.retry_after(4) for _ in range(5)] == pytest.approx([1, 2, 3, 4, 5], rel=0.05)
    clock.now += 3
    assert rate.retry_after(4) == pytest.approx(3, rel=0.5)
    assert rate.retry_after(1000) == LONGEST_S
    clock.now += 1000  # nothing ends any more
    assert rate.retry_after(1) == LONGEST_S
    rate.waiting(False)
    clock.now += 1000
    assert rate.retry_after(1) == LONGEST_S  # an idle time does not count


def test_pages_that_a_worker_will_have_are_expected_until_it_says_otherwise():
    pages = WorkerPages()
    pages.question()
    pages.take(common_pb2.KVEvents(snapshot=True, stored_to=2, removed_to=2, stored=[1, 2], complete=True), 100)
    pages.expect([2, 3, 4])
    pages.expect([3])
    assert all(digest in pages for digest in (1, 2, 3, 4)) and 5 not in pages
    pages.settle([2, 3, 4])
    assert pages.question() == common_pb2.StatusRequest(stored_to=2, removed_to=2, max_pages=8192)
    pages.settle([3])  # after the question: the answer does not know
    pages.take(common_pb2.KVEvents(stored_to=3, removed_to=3, removed=[1], stored=[4], complete=False), 100)
    assert 1 not in pages and 3 in pages and 4 in pages
    pages.question()
    pages.take(common_pb2.KVEvents(stored_to=4, removed_to=4, complete=True), 100)
    assert 3 not in pages and 4 in pages and len(pages) == 2
    pages.forget()
    assert 4 not in pages and pages.question().stored_to == 0


def test_clients_are_told_apart_without_their_keys():
    def scope(address: str) -> dict:
        return {"type": "http", "client": (address, 1), "headers": []}

    def without_key(address: str) -> str:
        return client_of(scope(address), None)

    assert client_of(scope("10.0.0.1"), 0) == client_of(scope("10.0.0.2"), 0) != client_of(scope("10.0.0.1"), 1)
    assert without_key("10.0.0.1") == "10.0.0.1"
    assert without_key("2001:db8::1") == without_key("2001:db8::ffff") != without_key("2001:db8:0:1::1")
    assert client_of({"type": "http", "client": None, "headers": []}, None) == "unknown"
