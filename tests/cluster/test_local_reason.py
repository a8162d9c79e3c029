"""An answer says why its prompt was computed on the decode worker."""

from tests.cluster.cluster import cluster
from tests.models import tiny_model

PROMPT = [7 + number % 90 for number in range(40)]


async def test_an_answer_says_why_its_prompt_stayed():
    async with cluster(tiny_model("llama"), decode={"local_prefill_tokens": 64}) as c:
        asked = {"max_tokens": 2}
        assert (await c.ask(PROMPT, **asked)).summary.local_reason == (
            "40 tokens were not cached; up to 64 are computed here"
        )
        assert (await c.ask([*PROMPT, *PROMPT], **asked)).summary.local_reason == ""
        assert (await c.ask(PROMPT, local=True, **asked)).summary.local_reason == "no prefill worker was chosen"
        scored = await c.ask([*PROMPT, *PROMPT], prompt_logprobs=0, **asked)
        assert scored.summary.local_reason == "log probabilities of the prompt need its logits"
        absent = await c.ask([9, *PROMPT, *PROMPT], workers=["127.0.0.1:1"], **asked)
        assert absent.summary.local_reason == "no prefill worker could compute it"
        await c.settled()
