"""The 32-byte record on the wire."""

import pytest

from k3.transfer.record import RECORD_BYTES, Kind, Record, unpack


def record(**changes):
    fields = {
        "kind": Kind.LAST,
        "sender": 65535,
        "transfer_id": (1 << 64) - 1,
        "nonce": (1 << 32) - 1,
        "seq": 4,
        "total": 5,
        "tokens": 1 << 20,
        "repost": 2,
    }
    return Record(**(fields | changes))


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("is_draft", [False, True])
def test_a_record_survives_the_wire(kind, is_draft):
    sent = record(kind=kind, is_draft=is_draft)
    assert len(sent.pack()) == RECORD_BYTES == 32
    assert unpack(sent.pack()) == sent


@pytest.mark.parametrize(
    "data",
    [
        b"",
        record().pack()[:-1],
        record().pack() + b"\0",
        b"KVX2" + record().pack()[4:],
        b"KVX1\x00" + record().pack()[5:],
        b"KVX1\x04" + record().pack()[5:],
        b"KVX1\xff" + record().pack()[5:],
        record(seq=5).pack(),
    ],
)
def test_anything_else_is_no_record(data):
    assert unpack(data) is None
