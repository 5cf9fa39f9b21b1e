"""A sender's transfers and the handles they have in flight: what is posted, within which limits, and what has ended.

`Flight` counts handles per pair of ranks and bytes per sender, posts and polls; what an end or an error means for its
transfer is decided in `outgoing.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from k3.config.tree import TransferConfig
from k3.transfer.agent import Handle, PeerLost, TransferAgent, WriteFailed
from k3.transfer.peers import Peer
from k3.transfer.pieces import Share
from k3.transfer.record import Kind, Record
from k3.v1 import plan_pb2

SLOWEST_BYTES_PER_S = 0.5e9 / 8  # deadline of a handle: eight times its duration at 0.5 GB/s


class State(Enum):
    """OPEN: pieces may come. SENT: everything is out. ENDING: failed or aborted, waiting for its handles."""

    OPEN = "open"
    SENT = "sent"
    ENDING = "ending"


@dataclass(slots=True)
class Piece:
    """One handle for one receiver, and its record; without a share the record goes alone."""

    after_step: int
    receiver: int
    share: Share | None
    record: Record

    @property
    def n_bytes(self) -> int:
        """Bytes written."""
        return 0 if self.share is None else self.share.link.rows.length * len(self.share.source)


@dataclass(slots=True)
class Transfer:
    """One outgoing transfer. pages: the destination's, by receiver; queues: pieces not posted; records: all of them."""

    start: plan_pb2.StartTransfer
    peer: Peer
    pages: dict[int, Sequence[int]]
    queues: dict[int, deque[Piece]]
    records: dict[int, list[Record]]
    draft_records: dict[int, list[Record]]
    state: State = State.OPEN
    has_last: bool = False
    n_live: int = 0
    pool_bytes: dict[str, int] = field(default_factory=dict[str, int])
    bytes_done: int = 0
    bytes_told: int = 0
    told_at: float = 0.0
    quiet_not_before: float = 0.0
    drain_until: float = 0.0

    def numbered(self, receiver: int, *, is_draft: bool) -> list[Record]:
        """Records of one receiver by sequence number; those of draft rows count apart."""
        return (self.draft_records if is_draft else self.records)[receiver]

    def append(
        self,
        sender: int,
        receiver: int,
        command: plan_pb2.CopyPages,
        shares: Sequence[Share | None],
        *,
        is_draft: bool,
    ) -> None:
        """Number the shares of a command and put them behind what waits for the receiver."""
        records = self.numbered(receiver, is_draft=is_draft)
        total = len(records) + len(shares)
        for share in shares:
            is_last = command.last and len(records) == total - 1
            record = Record(
                kind=Kind.LAST if is_last else Kind.DATA,
                sender=sender,
                transfer_id=self.transfer_id,
                nonce=self.start.nonce,
                seq=len(records),
                total=total if is_last else 0,
                tokens=command.tokens,
                is_draft=is_draft,
            )
            records.append(record)
            self.queues[receiver].append(Piece(command.after_step, receiver, share, record))

    @property
    def transfer_id(self) -> int:
        """The destination's id."""
        return self.start.transfer_id

    @property
    def is_out(self) -> bool:
        """Whether nothing is left to post or to wait for."""
        return self.has_last and self.n_live == 0 and not any(self.queues.values())


class Ended(NamedTuple):
    """A posted piece that has ended; error is None when its bytes are in place."""

    transfer: Transfer
    piece: Piece
    error: PeerLost | WriteFailed | None


@dataclass(slots=True)
class _Live:
    handle: Handle
    transfer: Transfer
    piece: Piece
    deadline: float


class Flight:
    """Handles that were posted and have not ended."""

    def __init__(self, config: TransferConfig, agent: TransferAgent) -> None:
        self._config = config
        self._agent = agent
        self._live: list[_Live] = []
        self._per_pair: dict[tuple[str, int], int] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._live)

    @property
    def n_zombies(self) -> int:
        """Handles whose transfer is ending."""
        return sum(live.transfer.state is State.ENDING for live in self._live)

    def has_room(self, transfer: Transfer, piece: Piece) -> bool:
        """Whether the limits allow one more; a single piece always goes."""
        pair = (transfer.peer.peer_id, piece.receiver)
        return self._per_pair.get(pair, 0) < self._config.handles_in_flight and (
            not self._live or self._bytes + piece.n_bytes <= self._config.bytes_in_flight
        )

    def post(self, transfer: Transfer, piece: Piece, share: Share, now: float) -> None:
        """Write one piece. Raises PeerLost or WriteFailed; nothing is in flight then."""
        record = piece.record.pack()
        handle = self._agent.write(share.link.lists, share.source, share.target, record)
        patience = max(self._config.handle_deadline_s, piece.n_bytes / SLOWEST_BYTES_PER_S)
        self._live.append(_Live(handle, transfer, piece, now + patience))
        pair = (transfer.peer.peer_id, piece.receiver)
        self._per_pair[pair] = self._per_pair.get(pair, 0) + 1
        self._bytes += piece.n_bytes
        transfer.n_live += 1
        transfer.peer.n_live += 1

    def poll(self) -> list[Ended]:
        """Ask for every handle; those that ended are forgotten."""
        ended: list[Ended] = []
        still: list[_Live] = []
        for live in self._live:
            error: PeerLost | WriteFailed | None = None
            try:
                has_ended = self._agent.poll(live.handle)
            except (PeerLost, WriteFailed) as raised:
                has_ended, error = True, raised
            if has_ended:
                self._forget(live)
                ended.append(Ended(live.transfer, live.piece, error))
            else:
                still.append(live)
        self._live = still
        return ended

    def overdue(self, now: float) -> Iterator[tuple[Transfer, Piece]]:
        """Pieces past their deadline."""
        return ((live.transfer, live.piece) for live in self._live if now > live.deadline)

    def _forget(self, live: _Live) -> None:
        pair = (live.transfer.peer.peer_id, live.piece.receiver)
        self._per_pair[pair] -= 1
        if self._per_pair[pair] == 0:
            del self._per_pair[pair]
        self._bytes -= live.piece.n_bytes
        live.transfer.n_live -= 1
        live.transfer.peer.n_live -= 1
