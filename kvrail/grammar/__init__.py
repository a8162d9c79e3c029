"""Grammars that outputs must match: texts that travel, compiled by llguidance. Free of torch: the router uses it."""

from kvrail.grammar.checking import Checker
from kvrail.grammar.compiling import Grammar, Grammars
from kvrail.grammar.matching import Matcher

__all__ = ["Checker", "Grammar", "Grammars", "Matcher"]
