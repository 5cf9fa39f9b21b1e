"""Records of draft rows count apart: a transfer arrives without them, and says once when they are complete too."""

from __future__ import annotations

import pytest

from k3.transfer.incoming import MAX_RECORDS, Incoming
from k3.transfer.record import Kind, Record
from k3.v1 import plan_pb2

pytestmark = pytest.mark.dspark

ID, NONCE = 77, 5


def record(seq: int, total: int, *, is_draft: bool, sender: int = 0) -> bytes:
    kind = Kind.LAST if total else Kind.DATA
    return Record(kind, sender, ID, NONCE, seq, total, tokens=4, is_draft=is_draft).pack()


def expecting(draft_senders: tuple[int, ...]) -> Incoming:
    incoming = Incoming(0, resend_after_s=1.0)
    command = plan_pb2.ExpectTransfer(
        transfer_id=ID, nonce=NONCE, senders=[0], draft_senders=draft_senders
    )
    assert incoming.expect(command, 0.0) == []
    return incoming


def said(statuses: list[plan_pb2.TransferStatus]) -> list[bool]:
    return [status.arrived.draft_complete for status in statuses]


def test_a_transfer_with_all_draft_rows_arrives_once_and_complete():
    incoming = expecting((0,))
    assert incoming.absorb([record(0, 0, is_draft=True), record(1, 2, is_draft=True)], 0.1) == []
    assert said(incoming.absorb([record(0, 1, is_draft=False)], 0.2)) == [True]
    assert not incoming.is_waiting


def test_late_draft_rows_are_waited_for_and_reported_after_the_arrival():
    incoming = expecting((0,))
    assert said(incoming.absorb([record(0, 1, is_draft=False)], 0.1)) == [False]
    assert incoming.is_waiting
    assert incoming.absorb([record(0, 0, is_draft=True)], 0.2) == []
    assert said(incoming.absorb([record(1, 2, is_draft=True)], 0.3)) == [True]
    assert not incoming.is_waiting


def test_without_draft_senders_the_rows_count_as_complete_and_their_records_as_foreign():
    incoming = expecting(())
    assert said(incoming.absorb([record(0, 1, is_draft=False)], 0.1)) == [True]
    assert incoming.absorb([record(0, 1, is_draft=True)], 0.2) == []
    assert incoming.n_foreign == 1


@pytest.mark.parametrize(("seq", "total"), [(MAX_RECORDS, 0), (0, MAX_RECORDS + 1), (0, 2**32 - 1)])
def test_numbers_that_no_sender_of_ours_has_are_foreign(seq: int, total: int):
    incoming = expecting(())
    assert incoming.absorb([record(seq, total, is_draft=False)], 0.1) == []
    assert incoming.overdue(9.0)[0].missing.missing[0].seqs == []
    assert incoming.n_foreign == 1


def test_missing_records_of_draft_rows_are_never_asked_for_again():
    incoming = expecting((0,))
    incoming.absorb([record(0, 1, is_draft=False)], 0.1)
    assert incoming.overdue(9.0) == []


def test_the_time_without_news_begins_anew_with_every_record():
    incoming = expecting(())
    assert incoming.waited_s(3.0) == 3.0
    incoming.absorb([record(0, 0, is_draft=False)], 4.0)
    assert incoming.waited_s(4.5) == 0.5
    incoming.absorb([record(1, 2, is_draft=False)], 5.0)
    assert incoming.waited_s(6.0) is None
