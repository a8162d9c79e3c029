"""How a page of KV is named, by router and workers alike: by the tokens that it holds and all that come before them."""

import hashlib
from array import array
from collections.abc import Sequence

PageHash = bytes


def page_hashes(
    token_ids: Sequence[int], page_size: int, known: Sequence[PageHash] = (), space: str = ""
) -> list[PageHash]:
    """Hash of each full page of a sequence; a page's hash covers every token up to its end, and the space.

    known: hashes of the leading pages, if some were computed before. space: sequences of different spaces share none.
    """
    hashes = list(known)
    for start in range(len(hashes) * page_size, len(token_ids) - page_size + 1, page_size):
        tokens = array("I", token_ids[start : start + page_size]).tobytes()
        parent = hashes[-1] if hashes else space.encode()
        hashes.append(hashlib.blake2b(parent + tokens, digest_size=16).digest())
    return hashes


def page_space(codec: str = "", salt: str = "") -> str:
    """The space of pages that came through `codec`, empty where they lost no bits, for requests of one cache salt."""
    return f"{codec}/{hashlib.blake2b(salt.encode(), digest_size=16).hexdigest()}" if salt else codec


def page_digest(page_hash: PageHash) -> int:
    """The first eight bytes of a hash as a number: enough to guess where a page is, not to take it for known."""
    return int.from_bytes(page_hash[:8], "little")
