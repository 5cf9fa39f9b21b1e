"""Incremental UTF-8: every chunking gives what decoding the whole gives."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.text.detokenize import Utf8Stream

# Bytes that meet at code points: valid text with cuts anywhere, and plainly broken sequences.
PIECES = st.one_of(
    st.binary(max_size=4),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=3).map(str.encode),
    st.sampled_from([b"\xe4\xb8", b"\xf0\x9f\x98", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf4\x90"]),
)


@given(st.lists(PIECES))
def test_deltas_add_up_to_the_decoded_whole(chunks: list[bytes]) -> None:
    stream = Utf8Stream()
    text = "".join(stream.push(chunk) for chunk in chunks) + stream.flush()
    assert text == b"".join(chunks).decode("utf-8", "replace")


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_byte_by_byte_emits_each_character_with_its_last_byte(text: str) -> None:
    stream = Utf8Stream()
    for char in text:
        *head, last = char.encode()
        assert [stream.push(bytes((byte,))) for byte in head] == [""] * len(head)
        assert stream.push(bytes((last,))) == char
    assert not stream.is_holding


def test_at_most_three_bytes_are_held() -> None:
    stream = Utf8Stream()
    assert stream.push(b"\xf0\x9f\x98") == ""
    assert stream.is_holding
    assert stream.push(b"a") == "\ufffda"
    assert stream.flush() == ""
