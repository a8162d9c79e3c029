"""The shape of an output: the grammar that it must match, and how it is read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvrail.grammar import Checker, texts
from kvrail.grammar.texts import Part
from kvrail.runtime.turns import Turns
from kvrail.services.router.errors import refuse
from kvrail.services.router.plan.reading import THINK, THOUGHT, OutputReader, ThoughtReader
from kvrail.services.router.plan.structured import OutputFormat, check, format_of
from kvrail.services.router.plan.tools.forms import CallForm, form_for
from kvrail.services.router.plan.tools.offered import Offer, call_rules
from kvrail.services.router.schema import ChatRequest, CompletionRequest
from kvrail.text import Tokenizer

_TAIL = 8
"""Tokens at a prompt's end among which reasoning may be opened."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of one request's outputs.

    grammar: as kvrail.grammar.texts writes it; empty: any text. reader: makes the reader of one output; None: the
    output is shown as it is. special: whether reading needs the text of special tokens.
    """

    grammar: str = ""
    reader: Callable[[], OutputReader] | None = None
    special: bool = False


class Shaper:
    """Shapes of the outputs of one model."""

    def __init__(self, tokenizer: Tokenizer, checker: Checker, tool_parser: str, reasoning_parser: str) -> None:
        """tool_parser, reasoning_parser: settings of the router."""
        self._tokenizer = tokenizer
        self._checker = checker
        self._turns = Turns()
        template = tokenizer.chat.source
        self._form = form_for(template, tool_parser)
        self._thinks = reasoning_parser != "none" if THINK in template else reasoning_parser not in ("none", "auto")
        self._opens = reasoning_parser == "deepseek_r1"

    async def completion(self, request: CompletionRequest, client: str) -> Shape:
        """Shape of a client's completion; InvalidRequestError names the parameter."""
        asked = format_of(request, self._tokenizer)
        if asked is None:
            return Shape()
        grammar = await self._turns.run(client, lambda: texts.whole(asked.part()))
        return Shape(await check(self._checker, grammar, client, asked))

    async def chat(self, request: ChatRequest, client: str, offer: Offer | None, prompt: Sequence[int]) -> Shape:
        """Shape of the answers to a client's chat; InvalidRequestError names the parameter. prompt: token ids."""
        asked = format_of(request, self._tokenizer)
        if asked is not None and asked.all_tokens and offer is not None:
            refuse(asked.param, "cannot be combined with tools; send one of them")
        form = self._form if offer is not None else None
        if offer is not None and form is None:
            refuse(
                "tools", "this model writes calls in no form that this server knows; its operator can set --tool-parser"
            )
        open_thought = self._thinks and self._is_thinking(prompt)
        grammar = ""
        if asked is not None or (offer is not None and (offer.must_call or any(f.strict for f in offer.functions))):
            make = partial(self._grammar, offer, form, asked, open_thought)
            grammar, blamed = await self._turns.run(client, make)
            grammar = await check(self._checker, grammar, client, blamed)
        if form is None and not self._thinks:
            return Shape(grammar)
        marks = [form.opens, form.closes] if form is not None else []
        marks += [THINK, THOUGHT] if self._thinks else []
        most = None if offer is None or offer.parallel else 1
        return Shape(
            grammar,
            lambda: OutputReader(form, ThoughtReader(open=open_thought) if self._thinks else None, most),
            any(self._tokenizer.special_id(mark) is not None for mark in marks),
        )

    def _grammar(
        self, offer: Offer | None, form: CallForm | None, asked: OutputFormat | None, open_thought: bool
    ) -> tuple[str, OutputFormat]:
        """The grammar of a chat, and the parameter to name where it cannot be compiled."""
        parts: dict[str, Part] = {}
        rules: list[str] = []
        blamed = asked or OutputFormat("tools", lambda: {})
        body = ""
        if asked is not None:
            parts["answer"], body = asked.part(), "@answer"
        if offer is not None and form is not None:
            text = asked is None and not offer.must_call
            body = "calls" if offer.must_call else "(calls AFTER | BEGIN)" if text else f"(calls | {body})"
            written, arguments = call_rules(offer, form, self._mark(form.opens), text=text)
            rules.append(written)
            parts |= arguments
            schemas = {f"{f.number}": {"function": {"parameters": f.parameters}} for f in offer.functions}
            blamed = OutputFormat("tools", lambda: {}, schemas)
        if not self._thinks or blamed.all_tokens:
            if body == "@answer":
                return texts.whole(parts["answer"]), blamed
            return texts.whole(texts.from_lark("\n".join([f"start: {body}", *rules])), **parts), blamed
        rules += [self._thought_rule(), "SPACE: /\\n{1,2}/"]
        thought = "thought SPACE?" if open_thought else f"({self._mark(THINK)} thought SPACE?)?"
        return texts.whole(texts.from_lark("\n".join([f"start: {thought} {body}", *rules])), **parts), blamed

    def _thought_rule(self) -> str:
        end = self._tokenizer.special_id(THOUGHT)
        if end is not None:
            return f"thought: THOUGHT <[{end}]>\nTHOUGHT: /(.|\\n)*/"
        return f"thought[lazy]: THOUGHT {texts.literal(THOUGHT)}\nTHOUGHT: /(.|\\n)*/"

    def _mark(self, text: str) -> str:
        """A mark as Lark writes it: its text, or its token where it is a special one."""
        token_id = self._tokenizer.special_id(text)
        return texts.literal(text) if token_id is None else f"<[{token_id}]>"

    def _is_thinking(self, prompt: Sequence[int]) -> bool:
        """Whether the prompt leaves reasoning open, or the model is known to open it by itself."""
        tail = self._tokenizer.decode(prompt[-_TAIL:], skip_special_tokens=False).rstrip()
        return tail.endswith(THINK) or (self._opens and not tail.endswith(THOUGHT))
