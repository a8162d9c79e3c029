"""A worker's KV cache, as its settings ask for it."""

import logging

from kvrail.config.kv_quality import check_model
from kvrail.config.settings import WorkerSettings
from kvrail.engine.kv.cache import PagedCache, pages_that_fit
from kvrail.engine.kv.closing_cache import ClosingCache, PoolSize, refusal, size_that_fits
from kvrail.engine.kv.pages import PagePool
from kvrail.engine.model.loader import LoadedModel
from kvrail.engine.step.closing import PageCloser
from kvrail.errors import ConfigError
from kvrail.worker.budgets import most_running

logger = logging.getLogger("kvrail.worker")


def pages_for(settings: WorkerSettings, loaded: LoadedModel) -> tuple[int | PoolSize, int]:
    """The pages that fit, and most sequences of a step.

    Raises ConfigError where none fit, or where they have no form that is asked for.
    """
    layout = loaded.layout
    page_bytes = layout.page_bytes // layout.num_layers
    if page_bytes > settings.max_frame_bytes:
        raise ConfigError(
            f"a frame has at most {settings.max_frame_bytes} bytes, but a page of one layer has {page_bytes};"
            " raise the decode workers' transfer_memory_mib or lower page_size"
        )
    num_pages = pages_that_fit(layout, loaded.device, settings.kv_memory_gib)
    running = most_running(settings, num_pages)
    if settings.kv_cache == "plain":
        return num_pages, running
    if settings.kv_quality:
        check_model(settings.kv_quality, settings.model, loaded.fingerprint)
    form, memory, longest = settings.kv_cache, settings.kv_memory_gib, loaded.max_model_len
    if why := refusal(form, layout, loaded.device, loaded.dtype):
        raise ConfigError(f"kv_cache is {form!r}, but {why}; set it to plain")

    def fitting(most: int) -> PoolSize:
        return size_that_fits(layout, loaded.device, memory, form, max_running=most, max_model_len=longest)

    running = most_running(settings, fitting(running).num_pages)
    return fitting(running), running


def page_pool(settings: WorkerSettings, cache: PagedCache) -> tuple[PagePool, PageCloser | None]:
    """The books of the pages, and what closes full ones."""
    pool = PagePool(cache.num_pages, settings.page_size, prefix_cache=settings.prefix_cache, slots=cache.slots)
    return pool, PageCloser(pool, cache) if isinstance(cache, ClosingCache) else None


def describe(cache: PagedCache) -> str:
    """The pages in words, for the log."""
    pages = f"{cache.num_pages} pages of {cache.layout.page_size} tokens"
    opened = "" if cache.slots is None else f", {cache.open_pages} of them open at once"
    return f"{pages}{opened} ({cache.layout.dtype}, {cache.bytes / (1 << 20):.1f} MiB)"
