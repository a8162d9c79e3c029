"""What may change KV: a codec on its way, or a form of pages at rest."""

from dataclasses import dataclass

import torch

from kvrail.codec.base import Codec, PagedBlock
from kvrail.engine.kv.closed.forms import CODE_BITS, page_bytes
from kvrail.engine.kv.closed.pages import LossyPages
from kvrail.values.layout import KVLayout


@dataclass(frozen=True, slots=True)
class OnTheWire:
    """A codec, with all of its stages."""

    codec: Codec

    @property
    def name(self) -> str:
        """The codec's."""
        return self.codec.name

    def pass_through(self, pages: PagedBlock) -> float:
        """Leave in the pages what the last stage leaves; bits of all payloads."""
        payloads = self.codec.encode(pages).stages()
        for stage in range(self.codec.num_stages):
            self.codec.decode(stage, payloads[: stage + 1], pages)
        values = pages.spec.raw_bytes // pages.pools.keys.element_size()
        return 8 * sum(payload.nbytes for payload in payloads) / values


@dataclass(frozen=True, slots=True)
class AtRest:
    """A form of pages; plain ones change nothing."""

    form: str
    layout: KVLayout

    @property
    def name(self) -> str:
        """The form's, which is not the name of a codec."""
        return f"{self.form} pages"

    def pass_through(self, pages: PagedBlock) -> float:
        """Close all pages but the first and open them again; bits of a closed one.

        A page that cannot be closed keeps its values.
        """
        keys, values = pages.pools.keys, pages.pools.values
        if self.form not in CODE_BITS:
            return 8.0 * keys.element_size()
        bits = CODE_BITS[self.form]
        chosen = pages.page_index()[1:]
        closed = LossyPages(self.layout, len(chosen), bits, keys.device)
        places = torch.arange(len(chosen), device=keys.device)
        taken = closed.close(keys, values, chosen, places) == 0
        closed.open(keys, values, places[taken], chosen[taken])
        return 16 * page_bytes(self.layout, bits) / self.layout.page_bytes


Lossy = OnTheWire | AtRest
"""What may change KV."""
