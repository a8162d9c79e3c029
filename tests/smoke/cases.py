"""What is tried: architectures with the defaults, and the settings that change a request's way with one of them."""

from dataclasses import dataclass

from tests.smoke.models import ARCHITECTURES

STAGED = ("splitzip-progressive-ans", "lynx-exact")
SMALL_POOL_GIB = str(64.5 * 64 * 4 * 2 * 2 * 64 * 2 / (1 << 30))
"""64 pages of 64 tokens of 4 layers with 2 heads of 64 keys and values in bfloat16."""
BOTH = ("--prefill-workers", "0", "--decode-workers", "0", "--workers", "2")
FLOAT32 = ("--dtype", "float32", "--kv-dtype", "float32")


@dataclass(frozen=True, slots=True)
class Case:
    """One cluster. flags: of kvrail up. codec: the one that prompts must cross by; empty: whichever."""

    name: str
    architecture: str
    flags: tuple[str, ...] = ()
    codec: str = ""

    @property
    def float32(self) -> bool:
        """Whether it computes in float32, in which no two tokens are nearly tied."""
        return "float32" in self.flags

    @property
    def remote(self) -> bool:
        """Whether prompts are computed by a worker of their own."""
        return "--prefill-workers" not in self.flags


def _has_experts(architecture: str) -> bool:
    return any("experts" in option for option in ARCHITECTURES[architecture])


def _of(architecture: str) -> Case:
    """With the defaults, or in float32 where experts are chosen: in bfloat16 the batch may change the choice.

    Experts in float32 wait for the host, so their steps cannot be captured.
    """
    flags = (*FLOAT32, "--eager") if _has_experts(architecture) else ()
    return Case(architecture, architecture, flags)


def _by(codec: str, transport: str) -> Case:
    return Case(f"{codec}, {transport}", "llama", ("--codec", codec, "--transport", transport), codec)


CASES = (
    *map(_of, ARCHITECTURES),
    *(Case(f"{name}, bfloat16", name) for name in ("qwen3_moe", "gpt_oss")),
    Case("llama, float32", "llama", FLOAT32),
    *(_by(codec, transport) for codec in STAGED for transport in ("tcp", "ucx")),
    Case("FP8 pages", "qwen3", ("--kv-dtype", "float8_e4m3fn")),
    Case("FP8 pages by TCP", "llama", ("--kv-dtype", "float8_e5m2", "--transport", "tcp")),
    Case("compact weights", "llama", ("--weights", "compact")),
    Case("TCA-TBE weights", "llama", ("--weights", "tbe")),
    Case("a pool too small", "llama", ("--kv-memory-gib", SMALL_POOL_GIB)),
    Case("lossless pages", "llama", ("--kv-cache", "lossless")),
    Case("lossless pages, a pool too small", "llama", ("--kv-cache", "lossless", "--kv-memory-gib", SMALL_POOL_GIB)),
    Case("int4 pages", "llama", ("--kv-cache", "int4")),
    Case("kvcomp pages", "qwen3", ("--kv-cache", "kvcomp")),
    Case("rot3 pages", "llama", ("--kv-cache", "rot3")),
    Case("int8 pages, two workers of both roles", "qwen3", ("--kv-cache", "int8", *BOTH)),
    Case("small steps", "mistral", ("--max-running", "6", "--max-batch-tokens", "256")),
    Case("eager", "gemma2", ("--eager",)),
    Case("pages of 16", "llama", ("--page-size", "16")),
    Case("one whole worker", "qwen3", ("--prefill-workers", "0")),
    Case("two decode workers", "llama", ("--decode-workers", "2")),
    Case("two workers of both roles", "llama", BOTH),
)
