"""The 32-byte record that follows every write: which transfer, which sender, which one of how many.

Layout, little endian: magic `KVX1`, kind (+16 for draft rows), repost, sender, transfer id, nonce, seq, total, tokens.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

MAGIC = b"KVX1"
DRAFT = 16
STRUCT = struct.Struct("<4sBBHQIIII")
RECORD_BYTES = STRUCT.size


class Kind(IntEnum):
    """DATA: more follow. LAST: `total` is known. AGAIN: sent again without its bytes."""

    DATA = 1
    LAST = 2
    AGAIN = 3


@dataclass(frozen=True, slots=True)
class Record:
    """seq: 0.. per (sender, receiver), draft records counted apart; total: records of this pair, 0 while unknown."""

    kind: Kind
    sender: int
    transfer_id: int
    nonce: int
    seq: int
    total: int
    tokens: int
    repost: int = 0
    is_draft: bool = False

    def pack(self) -> bytes:
        """The bytes on the wire."""
        return STRUCT.pack(
            MAGIC,
            self.kind + DRAFT * self.is_draft,
            self.repost,
            self.sender,
            self.transfer_id,
            self.nonce,
            self.seq,
            self.total,
            self.tokens,
        )


def unpack(data: bytes) -> Record | None:
    """A record, or None when the bytes are none: they come from the network and prove nothing."""
    if len(data) != RECORD_BYTES:
        return None
    magic, kind, repost, sender, transfer_id, nonce, seq, total, tokens = STRUCT.unpack(data)
    is_draft = kind >= DRAFT
    kind -= DRAFT * is_draft
    if magic != MAGIC or kind not in (Kind.DATA, Kind.LAST, Kind.AGAIN) or (total and seq >= total):
        return None
    return Record(Kind(kind), sender, transfer_id, nonce, seq, total, tokens, repost, is_draft)
