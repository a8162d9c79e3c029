"""What a receiver checks of a transfer as a whole: order, range, shape, each head of each page once a stage."""

from dataclasses import dataclass, replace

from kvrail.codec.base import BlockSpec
from kvrail.codec.frame import Bounds, FrameFormatError, FrameHeader
from kvrail.transfer.sizes import max_payload_bytes


@dataclass(frozen=True, slots=True)
class Transfer:
    """What one transfer brings: every stage of pages [first_page, first_page + spec.num_pages) of every layer.

    spec: shape of all of it as one block, with all KV heads. parameters_id: the codec's. Pages are logical indices in
    the request. From `first_recent_page` on, pages are wanted whole before drafting.
    """

    request_id: str
    codec: str
    num_stages: int
    spec: BlockSpec
    first_page: int
    first_recent_page: int = 0
    parameters_id: int = 0


class FrameGuard:
    """Admits frames of one transfer in order, each (stage, layer, head, page) exactly once, and counts what landed.

    A block is admitted at stage 0 where it overlaps no other, and at each later stage with the same bounds.
    """

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        spec = transfer.spec
        self._rows = spec.num_layers * spec.num_kv_heads  # of pages: a row is one head of one layer
        self._covered = bytearray(self._rows * spec.num_pages)  # at stage 0, layer by layer, head by head
        self._next_stage: dict[Bounds, int] = {}
        self._missing = [self._rows * spec.num_pages] * transfer.num_stages  # (layer, head, page), by stage
        self._to_admit = self.missing()
        self._recent_page = min(
            max(transfer.first_recent_page, transfer.first_page), transfer.first_page + spec.num_pages
        )
        recent_pages = transfer.first_page + spec.num_pages - self._recent_page
        self._missing_recent = recent_pages * self._rows * transfer.num_stages  # (stage, layer, head, page)
        self._next_sequence = 0

    def admit(self, header: FrameHeader, payload_bytes: int) -> None:
        """Take note of a frame that is to come.

        Raises FrameFormatError, and forgets the frame, where it does not belong here or is too long.
        """
        self._check_identity(header)
        self._check_bounds(header)
        spec = header.spec
        if payload_bytes > max_payload_bytes(spec):
            raise FrameFormatError(
                f"frame {header.sequence} has a payload of {payload_bytes} bytes; a stage of its block has at most"
                f" {max_payload_bytes(spec)}"
            )
        expected = self._next_stage.get(header.bounds, 0)
        if header.stage != expected:
            raise FrameFormatError(f"frame {header.sequence} has stage {header.stage}; its block's next is {expected}")
        if header.stage == 0:
            self._cover(header)
        self._next_stage[header.bounds] = header.stage + 1
        self._next_sequence += 1
        self._to_admit -= spec.num_layers * spec.num_kv_heads * spec.num_pages

    def all_admitted(self) -> bool:
        """Whether no frame is to come any more."""
        return self._to_admit == 0

    def landed(self, header: FrameHeader) -> None:
        """An admitted frame is in the pages."""
        spec = header.spec
        rows = spec.num_layers * spec.num_kv_heads
        self._missing[header.stage] -= rows * spec.num_pages
        recent_pages = header.first_page + spec.num_pages - max(header.first_page, self._recent_page)
        self._missing_recent -= rows * max(0, recent_pages)

    def complete(self, stage: int | None = None) -> bool:
        """Whether every head of every page of every layer has come, in `stage` or, without one, in all stages."""
        return self.missing() == 0 if stage is None else self._missing[stage] == 0

    def coarse_complete(self) -> bool:
        """Whether there is enough to draft on: stage 0 of every page, and all stages of the recent ones."""
        return self._missing[0] == 0 and self._missing_recent == 0

    def missing(self) -> int:
        """How many (stage, layer, head, page) have not landed yet."""
        return sum(self._missing)

    def _check_identity(self, header: FrameHeader) -> None:
        transfer = self._transfer
        for name in ("request_id", "codec", "num_stages", "parameters_id"):
            value, expected = getattr(header, name), getattr(transfer, name)
            if value != expected:
                raise FrameFormatError(f"frame {header.sequence} has {name} {value!r}; this transfer has {expected!r}")
        if header.sequence != self._next_sequence:
            raise FrameFormatError(f"frame has sequence {header.sequence}; the next is {self._next_sequence}")
        spec = transfer.spec
        shape = replace(
            header.spec, num_layers=spec.num_layers, num_pages=spec.num_pages, num_kv_heads=spec.num_kv_heads
        )
        if shape != spec:
            raise FrameFormatError(f"frame {header.sequence} has a block {header.spec}; this transfer has {spec}")

    def _check_bounds(self, header: FrameHeader) -> None:
        spec, transfer = header.spec, self._transfer
        last_layer, last_page = header.first_layer + spec.num_layers, header.first_page + spec.num_pages
        end_page = transfer.first_page + transfer.spec.num_pages
        if last_layer > transfer.spec.num_layers:
            raise FrameFormatError(
                f"frame {header.sequence} has layers {header.first_layer} to {last_layer}; "
                f"this transfer has {transfer.spec.num_layers}"
            )
        last_head = header.first_head + spec.num_kv_heads
        if last_head > transfer.spec.num_kv_heads:
            raise FrameFormatError(
                f"frame {header.sequence} has heads {header.first_head} to {last_head}; "
                f"this transfer has {transfer.spec.num_kv_heads}"
            )
        if header.first_page < transfer.first_page or last_page > end_page:
            raise FrameFormatError(
                f"frame {header.sequence} has pages {header.first_page} to {last_page}; "
                f"this transfer has {transfer.first_page} to {end_page}"
            )

    def _cover(self, header: FrameHeader) -> None:
        """Mark a block's pages; refuse it, marking none, where one was covered before."""
        whole, spec = self._transfer.spec, header.spec
        column = header.first_page - self._transfer.first_page
        layers = range(header.first_layer, header.first_layer + spec.num_layers)
        heads = range(header.first_head, header.first_head + spec.num_kv_heads)
        starts = [(layer * whole.num_kv_heads + head) * whole.num_pages + column for layer in layers for head in heads]
        for start in starts:
            if any(self._covered[start : start + spec.num_pages]):
                layer, head = divmod(start // whole.num_pages, whole.num_kv_heads)
                raise FrameFormatError(
                    f"frame {header.sequence} brings pages {header.first_page} to {header.first_page + spec.num_pages} "
                    f"of layer {layer}, head {head} for the second time"
                )
        for start in starts:
            self._covered[start : start + spec.num_pages] = b"\1" * spec.num_pages
