"""From the scheduler's work to one step: slices for the runner, rows for the sampler."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvrail.engine.batch.batch import SampledToken, SampleRow, SequenceSlice
from kvrail.engine.request.requests import WrittenPages
from kvrail.engine.request.sequence import Sequence as Seq
from kvrail.engine.schedule.output import banned_tokens
from kvrail.engine.schedule.scheduler import Work
from kvrail.engine.schedule.scoring import Scoring
from kvrail.errors import KvrailError

UNKNOWN = (0,)
"""In place of one token that the step before draws."""


@dataclass(slots=True)
class Step:
    """One step: the scheduler's work as slices for the runner and rows for the sampler.

    drawn_for: the sequence of each row. logit_rows: for each row, the row of the runner's logits that it draws from; a
    prompt's last logits serve n rows. scoring: prompts that rows of these logits score. sources: rows of the step
    before, whose draws are the first slices' tokens. stuck: sequences for which nothing is drawn, since their grammar
    allows no token.
    """

    work: list[Work]
    slices: list[SequenceSlice] = field(default_factory=list)
    written: list[WrittenPages] = field(default_factory=list)
    rows: list[SampleRow] = field(default_factory=list)
    drawn_for: list[Seq] = field(default_factory=list)
    logit_rows: list[int] = field(default_factory=list)
    scoring: list[Scoring] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    stuck: dict[Seq, KvrailError] = field(default_factory=dict)

    def constrained(self) -> bool:
        """Whether some row must match a grammar."""
        return any(sequence.matcher is not None for sequence in self.drawn_for)

    def drawn_in_order(self) -> list[SampleRow]:
        """The rows, if each slice has one and no grammar decides; otherwise none."""
        in_order = self.logit_rows == list(range(len(self.slices)))
        return self.rows if in_order and not self.constrained() else []

    def draws(self, tokens: Sequence[SampledToken]) -> dict[Seq, list[SampledToken]]:
        """The tokens drawn for the rows, by sequence."""
        drawn: dict[Seq, list[SampledToken]] = {}
        for sequence, token in zip(self.drawn_for, tokens, strict=True):
            drawn.setdefault(sequence, []).append(token)
        return drawn


def plan_step(work: Iterable[Work], page_size: int, eos_token_ids: frozenset[int]) -> Step:
    """Lay out a step."""
    step = Step(list(work))
    num_logits = 0
    for item in step.work:
        sequence, end = item.sequence, item.start + item.count
        if item.source is not None:
            step.sources.append(item.source)
            _add_rows(step, sequence, end, num_logits, eos_token_ids)
            step.slices.append(SequenceSlice(UNKNOWN, item.start, sequence.page_table, 1, closed=sequence.closed))
            num_logits += 1
            continue
        # A draw follows the newest token and each draft behind it; a step that drafts makes one draw.
        draws = 1 if item.drafts is not None else max(0, end - len(sequence.token_ids) + 1)
        logits = draws
        if sequence.scoring and end > sequence.scored:
            logits = end - max(item.start, sequence.scored)
            _add_scoring(step, sequence, end - logits, end, num_logits)
        num_logits += logits
        for position in range(end - draws + 1, end + 1):
            _add_rows(step, sequence, position, num_logits - (end + 1 - position), eos_token_ids)
        tokens = sequence.slice(item.start, end)
        copied = sequence.copied_page if item.start == sequence.computed else None  # a step before this one copies it
        step.slices.append(SequenceSlice(tokens, item.start, sequence.page_table, logits, copied, sequence.closed))
        if sequence.prefill_only:
            _add_written(step, sequence, item.start, end, page_size)
    return step


def draws_ahead(sequence: Seq) -> bool:
    """Whether the draw behind the next token or draft can be laid out before that one is known.

    It cannot if penalties make the draw depend on it, if the host takes part in the draw, or if the next token is the
    first of several sequences.
    """
    params = sequence.params
    several = params.n > 1 and not sequence.output_ids
    penalised = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1.0, 0.0, 0.0)
    edited = penalised or params.logit_bias or sequence.length() - len(sequence.prompt_ids) + 1 < params.min_tokens
    return not (several or edited or params.logprobs is not None)


def _add_rows(step: Step, sequence: Seq, position: int, logit_row: int, eos_token_ids: frozenset[int]) -> None:
    """Rows that draw the token at `position`: one, or n if it is the output's first."""
    prompt = len(sequence.prompt_ids)
    output = sequence.output_ids if position == len(sequence.token_ids) else sequence.slice(prompt, position)
    for index in (sequence.index,) if sequence.output_ids else range(sequence.params.n):
        step.drawn_for.append(sequence)
        step.logit_rows.append(logit_row)
        step.rows.append(
            SampleRow(
                params=sequence.params,
                index=index,
                position=position,
                prompt_ids=sequence.prompt_ids,
                output_ids=output,
                banned=banned_tokens(sequence.params, position - prompt, eos_token_ids),
            )
        )


def _add_scoring(step: Step, sequence: Seq, start: int, end: int, row: int) -> None:
    """Score the tokens from `start` + 1 to `end` that are the prompt's; the first one's logits are in `row`."""
    targets = sequence.prompt_ids[start + 1 : end + 1]
    if targets:
        step.scoring.append(Scoring(sequence, start + 1, targets, row))


def _add_written(step: Step, sequence: Seq, start: int, end: int, page_size: int) -> None:
    complete = -(-end // page_size) if end == len(sequence.prompt_ids) else end // page_size
    first = start // page_size
    if first < complete:
        step.written.append(WrittenPages(sequence.request_id, first, complete))
