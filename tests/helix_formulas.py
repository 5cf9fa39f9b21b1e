"""Published formulas of helix that the system itself never evaluates: its layouts and tables are held against them.

Bytes of a rank's caches under the mapping each pool is built with (the system's own are in `k3/cache/layout.py`),
tokens bought and paid for in whole pages, and the tables of a verify group, which ranks derive on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

from decode_svc.ledger import Ledger


def local_to_global(ledger: Ledger, local_tokens: int) -> int:
    """Global tokens that `local_tokens` of every rank buy: whole pages only when split over ranks."""
    if ledger.cp == 1:
        return local_tokens
    return local_tokens // ledger.page_tokens * ledger.block_tokens


def global_to_local(ledger: Ledger, tokens: int) -> int:
    """Tokens every rank must hold for `tokens` global ones."""
    return tokens if ledger.cp == 1 else ledger.pages(tokens) * ledger.page_tokens


@dataclass(frozen=True, slots=True)
class StateCost:
    """Recurrent state and convolution window of one request, per rank."""

    layers: int
    heads: int
    head_dim: int
    conv_width: int
    state_bytes: int
    conv_bytes: int

    def of(self, shards: int) -> int:
        """Bytes on each of `shards` ranks."""
        heads = self.heads // shards
        window = 3 * heads * self.head_dim * (self.conv_width - 1) * self.conv_bytes
        return self.layers * window + self._state(shards)

    def _state(self, shards: int) -> int:
        return self.layers * (self.heads // shards) * self.head_dim**2 * self.state_bytes

    def rollback(self, shards: int, group: int, form: str) -> int:
        """Bytes beyond `of` that let any prefix of `group` tokens be the accepted one, on each of `shards` ranks.

        form: `snapshots`, a further state per draft, or `replay`, a key, a delta and a log decay per token. Kimi-K3 in
        groups of 8, all ranks together: 2.83 GiB or 77.6 MiB, and 34.0 MiB of convolution inputs either way.
        """
        per_token = self.layers * self.heads // shards * 3 * self.head_dim
        inputs = (group - 1) * per_token * self.conv_bytes
        match form:
            case "snapshots":
                return inputs + (group - 1) * self._state(shards)
            case "replay":
                return inputs + group * per_token * self.state_bytes
            case _:
                raise ValueError(f"form={form!r}: expected snapshots or replay")


@dataclass(frozen=True, slots=True)
class DraftCost:
    """Cache of a drafter: grouped heads are sharded by head, a latent (`kv_heads` = 1) is replicated."""

    kind: str  # "gqa" | "mla"
    layers: int
    width: int
    kv_heads: int
    dtype_bytes: int

    def of(self, shards: int) -> int:
        """Bytes of one global token on each of `shards` ranks."""
        if self.kind == "mla":
            return self.layers * self.width * self.dtype_bytes
        return self.layers * 2 * -(-self.kv_heads // shards) * self.width * self.dtype_bytes


@dataclass(frozen=True, slots=True)
class PoolCost:
    """Bytes of everything one rank holds.

    The drafter's cache has two forms: a ring per draft slot (`ring_rows`), a fixed cost like the state, or pages
    (`ring_rows` = 0), which cost L tokens on every rank because draft rows are not spread over context ranks.
    record_bytes: what a state slot needs beyond its state to roll a verify group back.
    """

    ledger: Ledger
    target_token_bytes: int
    state_bytes: int
    record_bytes: int = 0
    draft_token_bytes: int = 0
    ring_rows: int = 0

    @property
    def page_bytes(self) -> int:
        """One page."""
        paged_draft = 0 if self.ring_rows else self.ledger.block_tokens * self.draft_token_bytes
        return self.ledger.page_tokens * self.target_token_bytes + paged_draft

    @property
    def slot_bytes(self) -> int:
        """One state slot."""
        return self.state_bytes + self.record_bytes

    @property
    def ring_bytes(self) -> int:
        """One draft slot."""
        return self.ring_rows * self.draft_token_bytes

    def pages(self, budget_bytes: int, slots: int, draft_slots: int = 0) -> int:
        """Pages that fit beside the slots (dummies included); below 1 when they do not."""
        fixed = slots * self.slot_bytes + draft_slots * self.ring_bytes
        return (budget_bytes - fixed) // self.page_bytes

    def capacity(self, pages: int) -> int:
        """Global tokens of the whole group."""
        return pages * self.ledger.block_tokens


@dataclass(frozen=True, slots=True)
class GroupShare:
    """What rank `r` sees of a verify group at positions `base .. base + k`."""

    slots: tuple[int, ...]  # index in the rank's local order, -1 when another rank owns the token
    bounds: tuple[int, ...]  # keys of this rank each token may see, itself included

    @property
    def owned(self) -> int:
        """Tokens of the group this rank writes."""
        return sum(slot >= 0 for slot in self.slots)

    @property
    def kv_len(self) -> int:
        """Keys of this rank after the group is written."""
        return self.bounds[-1]


def group_share(ledger: Ledger, base: int, group: int, r: int) -> GroupShare:
    """The per-token tables of one verify group, as the device derives them."""
    places = range(base, base + group)
    return GroupShare(
        tuple(ledger.local_index(p) if ledger.owner(p) == r else -1 for p in places),
        tuple(ledger.local_len(p + 1, r) for p in places),
    )
