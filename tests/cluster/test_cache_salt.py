"""Pages of a prompt are found again by requests of the same cache salt alone, on decode and prefill workers."""

from tests.cluster.cluster import cluster
from tests.cluster.test_equality import prompt_of
from tests.models import tiny_model


async def test_only_the_same_salt_finds_a_prefix():
    prompt = prompt_of(200)
    async with cluster(tiny_model("llama")) as c:
        (prefill,) = c.prefills.values()
        first = await c.ask(prompt)
        for salt in ("a", "b"):
            pages = prefill.engine.status().pages.cached
            answer = await c.ask(prompt, cache_salt=salt)
            assert answer.tokens == first.tokens and answer.summary.prefill_worker
            assert answer.summary.cached_tokens == 0
            await c.settled()
            assert prefill.engine.status().pages.cached > pages  # it was computed there again
        for salt in ("", "a", "b"):
            answer = await c.ask(prompt, cache_salt=salt)
            assert answer.tokens == first.tokens
            assert answer.summary.cached_tokens == 192
        await c.settled()
