"""How many tokens go into an engine's step, by its device and its part in the cluster."""

from kvrail.config.settings import DecodeSettings, WorkerSettings
from kvrail.engine.schedule.chunks import StepBudget

MIXED_TOKENS = 512
"""Tokens of a step on a GPU in which chunks of prompts go beside decodes. With an 8B model on an H200 a step of 2,048
tokens takes 50 ms, one of 512 some 13, and decodes add little to either. Small steps are four times as many, and in
each of them decodes get a token: 32 streams of 1,024 tokens in and 128 out need 1.35 s of the GPU instead of 1.65, by
arithmetic, and no stream waits 50 ms for a token. Smaller chunks would fill the chip less well."""
MIXED_TOKENS_CPU = 256
"""The same on a CPU. With 2,048, who was in the middle of an answer of the demo model waited 7 s for a token while a
prompt of 3,600 tokens was computed on two busy cores."""

PLACE_TOKENS = 1024
"""Tokens of pages for each sequence that runs: prompt and output of a usual request."""
LEAST_PLACES, MOST_PLACES, PLACES_STEP = 64, 256, 32
"""More than 256 sequences would cost all steps: each captured step with prompts computes the logits of all of them."""

PROMPT_LOGITS_BYTES, LEAST_PROMPT_ROWS = 128 << 20, 32
"""Of float32 logits from which a step makes log probabilities of prompts: 220 tokens with a vocabulary of 152,000. They
delay those who decode no more than any chunk of a prompt does."""


def mixed_tokens(settings: WorkerSettings) -> int:
    """Tokens of a step in which chunks of prompts go beside decodes."""
    return settings.mixed_batch_tokens or (MIXED_TOKENS_CPU if settings.device == "cpu" else MIXED_TOKENS)


def gap_seconds(settings: WorkerSettings) -> float:
    """Longest step in which sequences decode; 0: no limit. A CPU computes few tokens in any limit that suits a GPU."""
    if not isinstance(settings, DecodeSettings) or settings.device == "cpu":
        return 0.0
    return settings.slo_gap_ms / 1e3


def most_running(settings: WorkerSettings, num_pages: int) -> int:
    """Most sequences of a step: what was asked for, or as many as the pages hold with PLACE_TOKENS each."""
    if settings.max_running or settings.device == "cpu" or settings.roles == ("prefill",):
        return settings.max_running or LEAST_PLACES
    fitting = num_pages * settings.page_size // PLACE_TOKENS // PLACES_STEP * PLACES_STEP
    return min(MOST_PLACES, max(LEAST_PLACES, fitting))


def limits_of(settings: WorkerSettings, vocab_size: int, max_running: int) -> StepBudget:
    """What a worker's engine computes at once, and how many may wait; vocab_size: of its model."""
    return StepBudget(
        settings.max_batch_tokens,
        max_running,
        settings.max_waiting,
        mixed_tokens(settings),
        max(LEAST_PROMPT_ROWS, PROMPT_LOGITS_BYTES // (4 * vocab_size)),
        gap_seconds(settings),
    )
