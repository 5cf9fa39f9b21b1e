"""The receiving side of a mover: which records must arrive, which have, which are missing.

Pure: records come in as bytes, statuses go out as messages, time is an argument. A transfer is known only after
`expect`; a record of anything else, or with another nonce, is foreign: it is counted and dropped. A sender is complete
when its LAST record named the total and all of them are here; a transfer when all expected senders are. Draft rows are
counted apart: a transfer arrives without them, and is reported once more when they are complete too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from k3.transfer.record import Record, unpack
from k3.v1 import plan_pb2, prefill_pb2

Status = plan_pb2.TransferStatus
MAX_EXPECTED = 4096  # the oldest ones are long over
MAX_RECORDS = (
    1 << 16
)  # of one sender; a higher number is not ours, and a bitmap of so many bits would be memory


@dataclass(slots=True)
class _Tally:
    """Records of one sender. `seen` is a bitmap of sequence numbers, total is 0 while unknown."""

    seen: int = 0
    total: int = 0

    @property
    def is_complete(self) -> bool:
        return self.total > 0 and self.seen == (1 << self.total) - 1

    def note(self, record: Record) -> None:
        self.seen |= 1 << record.seq
        self.total = self.total or record.total

    def missing(self) -> list[int]:
        """Sequence numbers not seen; empty means unknown, so all."""
        return [seq for seq in range(self.total) if not self.seen >> seq & 1]


@dataclass(slots=True)
class _Expected:
    nonce: int
    senders: dict[int, _Tally]
    draft_senders: dict[int, _Tally]
    heard_at: float  # begun, or the newest record
    news_at: float
    has_arrived: bool = False
    has_drafts: bool = False


class Incoming:
    """Transfers that this rank is to receive."""

    def __init__(self, rank: int, resend_after_s: float) -> None:
        self._rank = rank
        self._resend_after_s = resend_after_s
        self._expected: dict[int, _Expected] = {}
        self.n_foreign = 0

    @property
    def is_waiting(self) -> bool:
        """Whether records are worth looking for."""
        return any(not (e.has_arrived and e.has_drafts) for e in self._expected.values())

    def waited_s(self, now: float) -> float | None:
        """How long nothing came for the transfers whose records are awaited, since the newest began or was heard of.

        None when none is awaited.
        """
        awaited = (e for e in self._expected.values() if not (e.has_arrived and e.has_drafts))
        since = max((e.heard_at for e in awaited), default=None)
        return None if since is None else now - since

    def expect(self, command: plan_pb2.ExpectTransfer, now: float) -> list[Status]:
        """Wait for a transfer from now on. One that has no sender for this rank arrives at once."""
        senders = {sender: _Tally() for sender in command.senders}
        draft_senders = {sender: _Tally() for sender in command.draft_senders}
        expected = _Expected(command.nonce, senders, draft_senders, now, now)
        self._expected[command.transfer_id] = expected
        if len(self._expected) > MAX_EXPECTED:
            del self._expected[next(iter(self._expected))]
        return self._arrival(command.transfer_id, expected)

    def forget(self, transfer_id: int) -> bool:
        """Stop waiting; whatever still comes is foreign. Returns whether the transfer was known."""
        return self._expected.pop(transfer_id, None) is not None

    def clear(self) -> None:
        """Forget everything: the agent was torn down."""
        self._expected.clear()

    def absorb(self, notes: Iterable[bytes], now: float) -> list[Status]:
        """Take the records that arrived."""
        statuses: list[Status] = []
        for note in notes:
            record = unpack(note)
            expected = self._expected.get(record.transfer_id) if record is not None else None
            if record is None or expected is None or not self._note(expected, record):
                self.n_foreign += 1
                continue
            expected.news_at = expected.heard_at = now
            statuses += self._arrival(record.transfer_id, expected)
        return statuses

    def overdue(self, now: float) -> list[Status]:
        """What transfers without news for `resend_after_s` still miss; the front asks again if they are committed."""
        statuses: list[Status] = []
        for transfer_id, expected in self._expected.items():
            if expected.has_arrived or now - expected.news_at < self._resend_after_s:
                continue
            expected.news_at = now
            missing = [
                prefill_pb2.MissingRecords(sender=sender, receiver=self._rank, seqs=tally.missing())
                for sender, tally in expected.senders.items()
                if not tally.is_complete
            ]
            report = plan_pb2.TransferMissing(transfer_id=transfer_id, missing=missing)
            statuses.append(Status(missing=report))
        return statuses

    def _note(self, expected: _Expected, record: Record) -> bool:
        """Whether the record belongs here; then it is counted. Repeated ones count once."""
        tallies = expected.draft_senders if record.is_draft else expected.senders
        tally = tallies.get(record.sender)
        if tally is None or record.nonce != expected.nonce:
            return False
        if max(record.seq + 1, record.total) > MAX_RECORDS:
            return False
        tally.note(record)
        return True

    def _arrival(self, transfer_id: int, expected: _Expected) -> list[Status]:
        before = (expected.has_arrived, expected.has_drafts)
        expected.has_arrived = all(t.is_complete for t in expected.senders.values())
        expected.has_drafts = all(t.is_complete for t in expected.draft_senders.values())
        if not expected.has_arrived or before == (expected.has_arrived, expected.has_drafts):
            return []
        arrived = plan_pb2.TransferArrived(
            transfer_id=transfer_id, draft_complete=expected.has_drafts
        )
        return [Status(arrived=arrived)]
