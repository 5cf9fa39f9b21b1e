"""The super-block ledger: which context-parallel rank holds which global position.

Everything is a closed form of the position. Page `b = pos // P` of a request lies on rank `b % C`; C consecutive pages
are a super-block of `L = P * C` tokens and have one page id, the same on every rank. Ranks hold no ledger: they get
page-table rows and derive the rest, so nothing can drift.

`pos` and `n` are global tokens of one request, `r` a context-parallel rank. C = 1 is the plain layout.
Golden: helix/closed_forms.json, partition.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ledger:
    """Closed forms for pages of `page_tokens` tokens over `cp` ranks."""

    page_tokens: int
    cp: int = 1

    def __post_init__(self) -> None:
        if self.page_tokens < 1 or self.cp < 1:
            raise ValueError(
                f"page_tokens={self.page_tokens}, cp={self.cp}: both must be at least 1"
            )

    @property
    def block_tokens(self) -> int:
        """L: tokens of one super-block."""
        return self.page_tokens * self.cp

    def owner(self, pos: int) -> int:
        """The rank that holds `pos`."""
        return pos // self.page_tokens % self.cp

    def local_index(self, pos: int) -> int:
        """Index of `pos` in its owner's local order."""
        return pos // self.block_tokens * self.page_tokens + pos % self.page_tokens

    def global_pos(self, index: int, r: int) -> int:
        """Inverse of `local_index` on rank `r`."""
        page, offset = divmod(index, self.page_tokens)
        return page * self.block_tokens + r * self.page_tokens + offset

    def local_len(self, n: int, r: int) -> int:
        """How many of the first `n` positions lie on rank `r`."""
        full, rest = divmod(n, self.block_tokens)
        over = rest - r * self.page_tokens
        return full * self.page_tokens + min(max(over, 0), self.page_tokens)

    def pages(self, n: int) -> int:
        """Pages every rank holds for `n` tokens; a rank may hold one without content."""
        return -(-n // self.block_tokens)

    def content_pages(self, n: int, r: int) -> int:
        """Pages of rank `r` with at least one of the first `n` tokens."""
        return max(0, -(-(-(-n // self.page_tokens) - r) // self.cp))

    def pool_slot(self, pos: int, table: Sequence[int]) -> int:
        """Place of `pos` in its owner's pool; `table` is the request's page table."""
        return table[pos // self.block_tokens] * self.page_tokens + pos % self.page_tokens

    def prompt_pages(self, n: int, r: int) -> range:
        """Pages of an `n`-token prompt that lie on rank `r`, by their index inside the prompt."""
        return range(r, -(-n // self.page_tokens), self.cp)

    def positions(self, n: int, r: int) -> list[int]:
        """The first `n` positions that lie on rank `r`, ascending."""
        return [self.global_pos(index, r) for index in range(self.local_len(n, r))]
