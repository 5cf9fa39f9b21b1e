"""Stop strings against the definition: earliest end, longest of those, hold only what may still match."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.text.stop import StopAutomaton, StopStream

STOPS = st.lists(st.text("ab\u00e9", min_size=1, max_size=4), min_size=1, max_size=5)
CHUNKS = st.lists(st.text("ab\u00e9c", max_size=5), max_size=8)


def expected(text: str, stops: list[str], *, include: bool) -> tuple[str, str | None]:
    """By the definition, over the whole text."""
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text, None
    end, minus_length, stop = min(ends)
    return text[: end if include else end + minus_length], stop


@given(CHUNKS, STOPS, st.booleans())
def test_every_chunking_ends_where_the_definition_says(
    chunks: list[str], stops: list[str], include: bool
) -> None:
    stream = StopStream(StopAutomaton(stops), include_stop=include)
    emitted = "".join(stream.push(chunk) for chunk in chunks)
    if stream.matched is None:
        emitted += stream.flush()
    assert (emitted, stream.matched) == expected("".join(chunks), stops, include=include)


@given(CHUNKS, STOPS)
def test_only_a_proper_prefix_of_a_stop_string_is_held_back(
    chunks: list[str], stops: list[str]
) -> None:
    stream = StopStream(StopAutomaton(stops))
    seen = emitted = ""
    for chunk in chunks:
        seen += chunk
        emitted += stream.push(chunk)
        if stream.matched is not None:
            return
        held = seen[len(emitted) :]
        candidates = [seen[-n:] for n in range(1, len(seen) + 1)]
        proper = [c for c in candidates if any(s.startswith(c) and s != c for s in stops)]
        assert held == max(proper, key=len, default="")


def test_text_after_a_match_is_dropped() -> None:
    stream = StopStream(StopAutomaton(["##"]))
    assert stream.push("a#") == "a"
    assert stream.push("#b") == ""
    assert stream.push("more") == ""
    assert stream.matched == "##"


def test_an_empty_stop_string_is_an_error() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopAutomaton(["a", ""])
