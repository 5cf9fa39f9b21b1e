"""Whether a destination is one we may write to: bounds against the pools that the peer announced.

Pure. The ledger spreads page b of a prompt over the context-parallel ranks: owner b % cp, place b // cp in the
owner's own list; a decode rank's cp rank is its flat rank modulo cp.
"""

from __future__ import annotations

from collections.abc import Sequence

from k3.errors import RequestRejected
from k3.v1 import prefill_pb2


def check_destination(
    destination: prefill_pb2.Destination,
    geometry: prefill_pb2.Geometry,
    *,
    page_tokens: int,
    prompt_len: int,
    least_lease_s: float,
) -> None:
    """Raises RequestRejected naming the field. geometry: the peer's; least_lease_s: exclusive bound."""
    if destination.generation < 1:
        raise _rejected("generation", destination.generation, "at least 1")
    if destination.have_pages:
        raise _rejected("have_pages", destination.have_pages, "0 in this version")
    if not destination.lease_s > least_lease_s:
        raise _rejected(
            "lease_s",
            destination.lease_s,
            f"more than self_fence + drain = {least_lease_s:g} s of this instance",
        )
    if destination.state_slot >= geometry.n_slots:
        raise _rejected("state_slot", destination.state_slot, f"below {geometry.n_slots}")
    if destination.HasField("draft_slot") and destination.draft_slot >= geometry.n_slots:
        raise _rejected("draft_slot", destination.draft_slot, f"below {geometry.n_slots}")
    n_ranks = geometry.pp * geometry.tp * geometry.cp
    own = {entry.rank: entry.pages for entry in destination.rank_pages}
    if len(own) != len(destination.rank_pages) or any(rank >= n_ranks for rank in own):
        ranks = [entry.rank for entry in destination.rank_pages]
        raise _rejected("rank_pages", ranks, f"each rank at most once, below {n_ranks}")
    n_pages = -(-prompt_len // page_tokens)
    for rank in range(n_ranks):
        owned = len(range(rank % geometry.cp, n_pages, geometry.cp))
        pages: Sequence[int] = own.get(rank, destination.pages)
        _check_pages(rank, pages, owned, geometry.n_pages)


def _check_pages(rank: int, pages: Sequence[int], owned: int, n_pages: int) -> None:
    if len(pages) < owned:
        raise _rejected("pages", f"{len(pages)} pages for rank {rank}", f"at least {owned}")
    if len(set(pages)) != len(pages):
        raise _rejected("pages", f"repeated pages for rank {rank}", "every page once")
    if pages and max(pages) >= n_pages:
        raise _rejected("pages", f"page {max(pages)} for rank {rank}", f"below {n_pages}")


def _rejected(name: str, got: object, expected: str) -> RequestRejected:
    param = f"destination.{name}"
    return RequestRejected(f"{param}: {got}, expected {expected}", param=param)
