"""What `/admin/ledger` shows: which context-parallel rank holds which tokens of which request, in which pages.

Everything is derived from the ledger and the reservation at the moment of asking; positions are global.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from decode_svc.ledger import Ledger
from decode_svc.request import DecodeRequest

Json = dict[str, object]


def overview(ledger: Ledger, requests: Iterable[DecodeRequest]) -> Json:
    """All open requests, and the tokens of all of them by rank."""
    listed = list(requests)
    ranks = range(ledger.cp)
    return {
        "page_tokens": ledger.page_tokens,
        "cp": ledger.cp,
        "rank_tokens": [sum(ledger.local_len(r.base, rank) for r in listed) for rank in ranks],
        "requests": [
            {"request_id": r.spec.request_id, "state": r.state.value, "tokens": r.base}
            for r in listed
        ],
    }


def holdings(ledger: Ledger, request: DecodeRequest, token_bytes: int) -> Json:
    """One request: tokens and pages on every rank. A page may hold nothing yet; one id is a page on every rank.

    token_bytes: of one token in all latent caches.
    """
    reservation = request.reservation
    pages = () if reservation is None else reservation.pages
    return {
        "request_id": request.spec.request_id,
        "state": request.state.value,
        "prompt_tokens": request.prompt_len,
        "tokens": request.base,
        "page_tokens": ledger.page_tokens,
        "cp": ledger.cp,
        "ranks": [
            {
                "cp": rank,
                "tokens": ledger.local_len(request.base, rank),
                "latent_bytes": ledger.local_len(request.base, rank) * token_bytes,
                "pages": _pages(ledger, request.base, pages, rank),
            }
            for rank in range(ledger.cp)
        ],
    }


def _pages(ledger: Ledger, n: int, pages: Sequence[int], rank: int) -> list[Json]:
    """The rank's pages in order: id, first position, tokens of the first `n` in it."""
    found: list[Json] = []
    for index, page in enumerate(pages):
        first = ledger.global_pos(index * ledger.page_tokens, rank)
        tokens = min(max(n - first, 0), ledger.page_tokens)
        found.append({"page": page, "first": first, "tokens": tokens})
    return found
