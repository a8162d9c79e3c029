"""Text to token ids and back: tokenizer, chat template, incremental detokenizer, stop strings. Free of torch."""

from kvrail.text.detokenizer import IncrementalDetokenizer
from kvrail.text.stop import StopMatcher, StopResult
from kvrail.text.tokenizer import Tokenizer, load_tokenizer

__all__ = ["IncrementalDetokenizer", "StopMatcher", "StopResult", "Tokenizer", "load_tokenizer"]
