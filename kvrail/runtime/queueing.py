"""Whose turn it is: a fair queue of prompts, by client. Pure: no clock, no network, no asyncio.

Each client has a counter of the tokens that were computed for it; the waiting client with the smallest one is next. A
client that returns after a pause starts at the smallest counter of the busy ones, so turns cannot be saved up. (Y.
Sheng et al., Fairness in serving large language models, OSDI 2024: virtual token counters.)

A client may hold at most a certain multiple of the free places, which leaves a share to clients with few. (A. K.
Choudhury and E. L. Hahne, Dynamic queue length thresholds for shared-memory packet switches, IEEE/ACM ToN 6(2), 1998.)
No place stays empty while a prompt waits: those that no client within its share can use are lent to the others. They
come back as soon as a client within its share waits: it takes them from those that borrowed last.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

OUTPUT_WEIGHT = 2
"""Weight of a generated token; a prompt token has 1 (Sheng et al.). A generated token takes a step of its own."""
PATIENCE = 64
"""Prompts that may pass one whose many sequences find no room; after that all wait for it."""


@dataclass(eq=False, slots=True)
class Ticket:
    """A prompt that waits. places: sequences that it needs room for. priority: within its client; lower is earlier.

    kind: which workers it can go to; it waits for its client's prompts of the same kind alone. passed: prompts that
    were served before it because it found no room. lent: its places are, or would be, beyond the share of its client.
    took: it has taken lent places back, which it does once.
    """

    client: str
    places: int
    tokens: int
    priority: int = 0
    kind: str = ""
    passed: int = 0
    lent: bool = False
    took: bool = False
    order: tuple[int, int] = field(default=(0, 0))

    def __lt__(self, other: "Ticket") -> bool:
        return self.order < other.order


def fair(held: int, more: int, free: int, share: float) -> bool:
    """Whether a client that holds `held` places may have `more` of the `free` ones; a share stays free for newcomers.

    One greedy client gets all but `share` of the places, rounded; two get nearly half each.
    """
    return more <= free and (held + more) * share <= (1 - share) * (free - more + 0.5)


class FairQueue:
    """Tickets that wait, by client, and what each client holds. Take one out by `granted`, then `ended`.

    share: of all places, that a greedy client leaves to newcomers; 0: none.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._waiting: dict[str, dict[str, list[Ticket]]] = {}  # by client and kind, a heap each
        self._served: Counter[str] = Counter()  # weighted tokens of clients that wait or hold something
        self._held: Counter[str] = Counter()  # places
        self._lent: dict[str, list[Ticket]] = {}  # tickets that hold places beyond their client's share, oldest first
        self._numbers = 0
        self._gone: set[Ticket] = set()  # in a heap still
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def clients(self) -> int:
        """Clients that wait."""
        return len(self._waiting)

    @property
    def kinds(self) -> set[str]:
        """Kinds of the tickets that wait."""
        return set().union(*self._waiting.values())

    def add(self, ticket: Ticket) -> None:
        """Put a ticket behind those of its client that have its priority."""
        self._numbers += 1
        ticket.order = ticket.priority, self._numbers
        self._push(ticket)

    def put_back(self, ticket: Ticket) -> None:
        """Put a ticket whose places came to nothing before all others of its client; it has cost nothing yet."""
        if ticket.client in self._served:
            self._served[ticket.client] -= ticket.tokens
        ticket.order = ticket.order[0] - (1 << 32), ticket.order[1]
        self._push(ticket)

    def remove(self, ticket: Ticket) -> None:
        """The ticket's caller has left."""
        self._gone.add(ticket)
        self._length -= 1
        self._tidy(ticket)

    def turns(self, free: int) -> Iterator[Ticket]:
        """The first ticket of each client and kind: of clients within their share of `free` places, then of the others.

        Among either, the client served least is first. A client that holds nothing is within its share, and places that
        are lent count as free. The caller takes the first that fits. A ticket that PATIENCE others have passed is the
        last one.
        """
        free += sum(ticket.places for tickets in self._lent.values() for ticket in tickets)
        heads = (tickets[0] for kinds in self._waiting.values() for tickets in kinds.values())
        for rank, ticket in sorted((self._rank(head, free), head) for head in heads):
            ticket.lent = rank[0]
            yield ticket
            if ticket.passed >= PATIENCE:
                return

    def granted(self, ticket: Ticket, passed: Iterable[Ticket] = ()) -> None:
        """The ticket has its places; its prompt is computed. passed: those before it, for which there was no room."""
        for other in passed:
            other.passed += 1
        self._held[ticket.client] += ticket.places
        if ticket.lent:
            self._lent.setdefault(ticket.client, []).append(ticket)
        self.charge(ticket.client, ticket.tokens)
        self.remove(ticket)

    def borrowed(self, ticket: Ticket, helps: Callable[[Ticket], bool] = lambda _: True) -> Ticket | None:
        """The ticket that is to give its places back to this one, which no room was found for; None: it has to wait.

        helps: whether a ticket's places are where this one can go.
        """
        if ticket.lent or ticket.took:
            return None
        others = sorted((len(lent), client) for client, lent in self._lent.items() if client != ticket.client)
        candidates = (each for _, client in reversed(others) for each in reversed(self._lent[client]))
        return next((each for each in candidates if each.places >= ticket.places and helps(each)), None)

    def charge(self, client: str, tokens: int) -> None:
        """Tokens were computed for a client."""
        self._served[client] += tokens

    def ended(self, ticket: Ticket) -> None:
        """The ticket's places are free again."""
        self._held[ticket.client] -= ticket.places
        if lent := self._lent.get(ticket.client):
            own = (
                ticket if ticket.lent else lent[0]
            )  # where a place of its own ends, one that it has borrowed takes over
            lent.remove(own)
            own.lent = False
            if not lent:
                del self._lent[ticket.client]
        if self._held[ticket.client] <= 0:
            del self._held[ticket.client]
        self._tidy(ticket)

    def _rank(self, ticket: Ticket, free: int) -> tuple[bool, int, tuple[int, int]]:
        """The lower, the sooner it is the client's turn: whether it is beyond its share, its tokens, its order."""
        held = self._held.get(ticket.client, 0)
        beyond = held > 0 and not fair(held, ticket.places, free, self._share)
        return beyond, self._served[ticket.client], ticket.order

    def _push(self, ticket: Ticket) -> None:
        client = ticket.client
        if client not in self._waiting and client not in self._held:
            busy = self._waiting.keys() | self._held.keys()
            least = min((self._served[each] for each in busy), default=0)
            self._served[client] = max(self._served[client], least)
        heapq.heappush(self._waiting.setdefault(client, {}).setdefault(ticket.kind, []), ticket)
        self._length += 1

    def _tidy(self, ticket: Ticket) -> None:
        """Forget what has gone from the head of a ticket's heap, and its client where nothing is left of it."""
        client = ticket.client
        kinds = self._waiting.get(client, {})
        heap = kinds.get(ticket.kind)
        while heap and heap[0] in self._gone:
            self._gone.discard(heapq.heappop(heap))
        if heap is not None and not heap:
            del kinds[ticket.kind]
            if not kinds:
                del self._waiting[client]
        if client not in self._waiting and client not in self._held:
            del self._served[client]
