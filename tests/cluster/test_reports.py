"""What real workers report of their pages and step costs, as the router takes it in."""

from dataclasses import replace

from kvrail.services.router.fleet.prefixes import WorkerPages
from kvrail.values.pagehash import page_digest, page_hashes
from tests.cluster.cluster import cluster
from tests.models import tiny_model

PROMPT = [7 + number % 90 for number in range(200)]
DIGESTS = [page_digest(each) for each in page_hashes(PROMPT, 64)]


async def test_pages_are_reported_under_the_names_that_the_router_gives_them():
    async with cluster(tiny_model("llama"), num_pages=24) as c:
        decode, prefill = WorkerPages(), WorkerPages()
        (worker,) = c.prefills.values()

        async def hear() -> None:
            answer = await c.client.get_status(decode.question(), timeout_s=10)
            decode.take(answer.kv_events, answer.pages_total)
            said = worker.reporter({}, []).report(prefill.question())
            prefill.take(said.kv_events, said.pages_total)
            assert said.kv_events.complete and answer.kv_events.complete
            assert said.max_batch_tokens == answer.max_batch_tokens == 512
            assert not said.metrics_tls

        await hear()
        assert (len(decode), len(prefill)) == (0, 0)
        first = await c.ask(PROMPT)
        assert first.summary.cached_tokens == 0
        await hear()
        assert len(DIGESTS) == 3
        assert all(digest in pages for digest in DIGESTS for pages in (decode, prefill))
        assert (await c.ask(PROMPT)).summary.cached_tokens == 192
        assert worker.reporter({}, []).report(prefill.question()).report.prompt_tokens == 200 + 8  # then the last page
        behind_tls = worker.settings.model_copy(update={"metrics_tls": True})
        assert replace(worker.reporter({}, []), settings=behind_tls).report(prefill.question()).metrics_tls
        assert worker.engine.step_cost.prefill.each > 0
        assert (await c.client.get_status(timeout_s=10)).step_cost.decode_each > 0
        for number in range(100, 110):  # what is not used any more goes
            await c.ask([number, *PROMPT[1:]])
        await hear()
        for pages, pool in ((decode, c.decode), (prefill, worker)):
            held = {page_digest(each) for each in pool.engine._scheduler.pool._page_of}
            assert {digest for digest in held if digest in pages} == held and len(pages) == len(held)
            assert not all(digest in pages for digest in DIGESTS)
        assert not (await c.client.get_status(timeout_s=10)).HasField("kv_events")
        await c.settled()
