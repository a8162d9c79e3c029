"""Which pages travel together: what is complete is joined, then cut to what fits into a frame."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class Piece:
    """Pages [first_page, end_page) of layers [first_layer, end_layer), complete once `ready` has happened."""

    first_layer: int
    end_layer: int
    first_page: int
    end_page: int
    ready: torch.Event | None


def cut(
    pieces: Iterable[Piece], held_pages: int, frame_pages: int, border: int = 0, frame_layers: int = 0
) -> Iterator[Piece]:
    """Pieces of at most `frame_pages` pages of a layer, without the first `held_pages` pages; each has one beyond them.

    Neighbouring layers of the same pages go together as far as a frame goes: what is joined is as late as its last
    layer. Pieces of one cut are of about the same size: codecs do worst on small ones. None has pages on both sides of
    `border`, nor more than `frame_layers` layers unless that is 0.
    """
    for piece in _joined(pieces, frame_pages):
        begin, middle = max(piece.first_page, held_pages), min(max(border, held_pages), piece.end_page)
        for first_page, end_page in ((begin, middle), (max(begin, middle), piece.end_page)):
            if first_page < end_page:
                part = replace(piece, first_page=first_page, end_page=end_page)
                yield from _cut_evenly(part, frame_pages, frame_layers)


def _cut_evenly(piece: Piece, frame_pages: int, frame_layers: int) -> Iterator[Piece]:
    pages = _even(piece.end_page - piece.first_page, frame_pages)
    fitting = frame_pages // pages
    layers = _even(piece.end_layer - piece.first_layer, min(fitting, frame_layers or fitting))
    for layer in range(piece.first_layer, piece.end_layer, layers):
        for page in range(piece.first_page, piece.end_page, pages):
            end_layer, end_page = min(layer + layers, piece.end_layer), min(page + pages, piece.end_page)
            yield Piece(layer, end_layer, page, end_page, piece.ready)


def _even(count: int, most: int) -> int:
    """Size of the parts, at most `most`, into which `count` is cut evenly."""
    parts = -(-count // most)
    return -(-count // parts)


def _joined(pieces: Iterable[Piece], frame_pages: int) -> list[Piece]:
    """Pieces with neighbouring layers of the same pages made one while it fits into a frame, or nothing is computing.

    The later `ready` covers the earlier.
    """
    joined: list[Piece] = []
    for piece in pieces:
        last, pages = joined[-1] if joined else None, piece.end_page - piece.first_page
        if (
            last is not None
            and last.end_layer == piece.first_layer
            and (last.first_page, last.end_page) == (piece.first_page, piece.end_page)
            and (piece.ready is None or (piece.end_layer - last.first_layer) * pages <= frame_pages)
        ):
            joined[-1] = Piece(last.first_layer, piece.end_layer, piece.first_page, piece.end_page, piece.ready)
        else:
            joined.append(piece)
    return joined
