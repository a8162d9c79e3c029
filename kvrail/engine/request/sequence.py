"""A sequence on its way through the engine: its tokens, its pages, and how far its KV is computed."""

from dataclasses import dataclass, field, replace
from enum import Enum, auto

from kvrail.grammar import Matcher
from kvrail.values.pagehash import PageHash, page_hashes
from kvrail.values.sampling import FinishReason, SamplingParams


class Status(Enum):
    """Where a sequence is."""

    WAITING = auto()  # holds no pages
    RECEIVING = auto()  # holds pages that a transfer is writing
    DRAFTING = auto()  # the same, and every step makes a draft from the coarse KV in them
    RUNNING = auto()  # holds pages; every step computes some of its tokens
    FINISHED = auto()


@dataclass(eq=False, slots=True)
class Sequence:
    """One of a request's n sequences.

        0            computed              len(token_ids)
        |---- KV in pages ----|--- to compute ---|-- drafts --|
                                                 └ a decoding sequence has exactly one token to compute, and no drafts

    leads: whether it gets pages before the others of its request, since it computes the prompt. remote: whether another
    worker computes the KV if more than local_tokens of the prompt lack it. copied_page: held too, until a step has
    copied its KV, up to `computed`, into the sequence's own last page. drafts: guesses of the tokens that follow; KV
    that was computed from them does not count before they are verified. matcher: None unless the output must match a
    grammar. scored: leading tokens of the prompt behind which the next token's log probability has been reported.
    borrowed: whether some of the KV was not computed for it: another worker sent it, or it was cached. solitary:
    borrows nothing, since KV that it had borrowed gave no finite logits. closed: how many of its pages, behind the
    first, it reads closed and needs open no more; None: it reads pages in the form that they have. steps: in-flight
    ones that compute it.
    """

    request_id: str
    index: int
    params: SamplingParams
    prompt_ids: list[int]
    arrival: int
    leads: bool = True
    remote: bool = False
    local_tokens: int = 0
    prefill_only: bool = False
    cache_space: str = ""
    output_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(init=False)
    page_table: list[int] = field(default_factory=list)
    copied_page: int | None = None
    computed: int = 0
    published: int = 0
    cached_tokens: int = 0
    drafts: list[int] = field(default_factory=list)
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    known_hashes: list[PageHash] = field(default_factory=list)
    matcher: Matcher | None = None
    scored: int = 0
    preemptions: int = 0
    borrowed: bool = False
    solitary: bool = False
    closed: int | None = None
    steps: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.token_ids = [*self.prompt_ids, *self.output_ids]

    def once_more(self, *, solitary: bool) -> "Sequence":
        """The same sequence from its beginning: it holds no pages, and no other worker computes its KV."""
        return replace(
            self,
            remote=False,
            output_ids=list(self.output_ids),
            page_table=[],
            copied_page=None,
            computed=0,
            published=0,
            drafts=[],
            status=Status.WAITING,
            borrowed=False,
            solitary=solitary,
            closed=None,
        )

    def append(self, token_id: int) -> None:
        """Add one generated token."""
        self.output_ids.append(token_id)
        self.token_ids.append(token_id)

    def length(self) -> int:
        """Tokens and drafts."""
        return len(self.token_ids) + len(self.drafts)

    @property
    def copied_pages(self) -> list[int]:
        """The page that is held to be copied, if there is one."""
        return [] if self.copied_page is None else [self.copied_page]

    def slice(self, start: int, end: int) -> list[int]:
        """Tokens `start` to `end` - 1; drafts count on behind the tokens."""
        tokens = len(self.token_ids)
        return [*self.token_ids[start:end], *self.drafts[max(start - tokens, 0) : max(end - tokens, 0)]]

    def to_compute(self) -> int:
        """Tokens and drafts whose KV is not in the pages yet."""
        return self.length() - self.computed

    def is_decoding(self) -> bool:
        """Whether only the newest token remains to be computed."""
        return self.to_compute() == 1 and bool(self.output_ids) and not self.drafts

    @property
    def scoring(self) -> bool:
        """Whether log probabilities of the prompt's tokens are still to be reported."""
        return self.params.prompt_logprobs is not None and self.scored < len(self.prompt_ids) - 1

    def hashes(self, page_size: int) -> list[PageHash]:
        """Hashes of all full pages of the tokens so far."""
        if len(self.known_hashes) < len(self.token_ids) // page_size:
            self.known_hashes = page_hashes(self.token_ids, page_size, self.known_hashes, self.cache_space)
        return self.known_hashes

    def shareable(self, page_size: int) -> list[PageHash]:
        """Hashes of the leading full pages whose KV may be another sequence's."""
        hashes = [] if self.solitary else self.hashes(page_size)
        return hashes[: self.scored // page_size] if self.scoring else hashes
