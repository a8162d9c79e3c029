"""What travels in one frame: pieces cut to its pages and layers, each page of each layer once."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvrail.transfer.pieces import Piece, cut

LAYERS, PAGES = 6, 20


@given(st.integers(1, 40), st.integers(0, LAYERS), st.integers(0, PAGES - 1), st.integers(0, PAGES), st.booleans())
def test_every_page_travels_once_in_frames_that_are_no_larger_than_asked(pages, layers, held, border, by_layer):
    computed = [(layer, layer + 1) for layer in range(LAYERS)] if by_layer else [(0, LAYERS)]
    pieces = [Piece(first, end, 0, PAGES, None) for first, end in computed]
    sent: Counter[tuple[int, int]] = Counter()
    for piece in cut(pieces, held, pages, border, layers):
        assert (piece.end_layer - piece.first_layer) * (piece.end_page - piece.first_page) <= pages
        assert not layers or piece.end_layer - piece.first_layer <= layers
        assert not piece.first_page < border < piece.end_page
        sent.update(
            (layer, page)
            for layer in range(piece.first_layer, piece.end_layer)
            for page in range(piece.first_page, piece.end_page)
        )
    assert sent == Counter((layer, page) for layer in range(LAYERS) for page in range(held, PAGES))
