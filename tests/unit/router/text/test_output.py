"""A choice's text: grouping of tokens does not matter, and tokens travel with the text they end in."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from k3.types import TokenEvent
from router.text.chat_format import load_chat_format
from router.text.output import ChoiceText, Piece, PlainParser
from router.text.reasoning import Channel, ChannelParser
from router.text.stop import StopAutomaton

TINY = Path(__file__).parents[4] / "k3" / "assets" / "tiny"
TOKENIZER, FORMAT = load_chat_format(TINY)
CONTROL = FORMAT.control
TOKENS = st.lists(
    st.sampled_from([*b"ab#\n\xe4\xb8\xad\xf0", CONTROL.open, CONTROL.close, CONTROL.sep])
    | st.sampled_from(["think", "response", "tools", "ab", "#a"]).map(
        lambda word: TOKENIZER.encode(word)[0]
    ),
    max_size=30,
)
STOPS = st.lists(st.sampled_from(["a#", "##", "ab#a", "\u4e2d"]), max_size=3)


def choice(stops: list[str], *, chat: bool = True, **kwargs: object) -> ChoiceText:
    parser = (
        ChannelParser(TOKENIZER, CONTROL, Channel.REASONING)
        if chat
        else PlainParser(TOKENIZER, skip_special_tokens=True)
    )
    automaton = StopAutomaton(stops) if stops else None
    return ChoiceText(parser, automaton, **kwargs)  # type: ignore[arg-type]


def run(text: ChoiceText, groups: list[list[int]]) -> list[Piece]:
    pieces: list[Piece] = []
    for group in groups:
        pieces += text.push([TokenEvent(token) for token in group])
    return pieces + text.finish()


def summary(pieces: list[Piece]) -> tuple[list[tuple[Channel, str]], list[tuple[int, int]]]:
    """Runs of text per channel, and the tokens with their offsets."""
    runs: list[tuple[Channel, str]] = []
    for piece in pieces:
        if runs and runs[-1][0] is piece.channel:
            runs[-1] = (piece.channel, runs[-1][1] + piece.text)
        elif piece.text:
            runs.append((piece.channel, piece.text))
    tokens = [(token.event.id, token.offset) for piece in pieces for token in piece.tokens]
    return runs, tokens


@given(TOKENS, STOPS, st.booleans(), st.integers(0, 4), st.data())
def test_grouping_of_tokens_does_not_matter(
    ids: list[int], stops: list[str], chat: bool, min_tokens: int, data: st.DataObject
) -> None:
    groups: list[list[int]] = []
    rest = ids
    while rest:
        n = data.draw(st.integers(1, len(rest)))
        groups.append(rest[:n])
        rest = rest[n:]
    one, many = (choice(stops, chat=chat, min_tokens=min_tokens) for _ in range(2))
    assert summary(run(one, [ids])) == summary(run(many, groups))
    assert (one.matched, one.n_tokens) == (many.matched, many.n_tokens)


@given(TOKENS, STOPS)
def test_every_kept_token_comes_out_once_and_in_order(ids: list[int], stops: list[str]) -> None:
    text = choice(stops)
    _, tokens = summary(run(text, [[token] for token in ids]))
    assert [token for token, _ in tokens] == ids[: text.n_tokens]


@given(TOKENS)
def test_without_stops_the_text_is_the_decoded_whole(ids: list[int]) -> None:
    runs, _ = summary(run(choice([], chat=False), [[token] for token in ids]))
    assert "".join(text for _, text in runs) == TOKENIZER.decode(ids, skip_special_tokens=True)


def test_a_token_waits_for_the_rest_of_its_character() -> None:
    text = choice([], chat=False)
    first, second, third = "\u4e2d".encode()
    assert text.push([TokenEvent(first), TokenEvent(second)]) == []
    (piece,) = text.push([TokenEvent(third)])
    assert piece.text == "\u4e2d"
    assert [token.event.id for token in piece.tokens] == [first, second, third]


def test_a_token_whose_text_is_held_by_the_stop_search_waits_with_it() -> None:
    text = choice(["##"], chat=False)
    (piece,) = text.push([TokenEvent(ord("a")), TokenEvent(ord("#"))])
    assert (piece.text, [token.event.id for token in piece.tokens]) == ("a", [ord("a")])
    (piece,) = text.push([TokenEvent(ord("b"))])
    assert (piece.text, [token.event.id for token in piece.tokens]) == ("#b", [ord("#"), ord("b")])


def test_tokens_of_one_group_go_with_the_channel_of_their_text() -> None:
    ids = TOKENIZER.encode("ab<|close|>think<|sep|><|open|>response<|sep|>c", allow_special=True)
    reasoning, content = run(choice([]), [ids])
    n_reasoning = len(TOKENIZER.encode("ab"))
    # Tags have no text of their own: they go with the text before them.
    assert [token.event.id for token in reasoning.tokens] == ids[:-1]
    assert [token.event.id for token in content.tokens] == ids[-1:]
    assert n_reasoning < len(reasoning.tokens)


def test_stop_strings_end_in_reasoning_too_and_do_not_span_channels() -> None:
    ids = TOKENIZER.encode(
        "x#<|close|>think<|sep|><|open|>response<|sep|>#y##z", allow_special=True
    )
    text = choice(["##"])
    runs, _ = summary(run(text, [ids]))
    assert runs == [(Channel.REASONING, "x#"), (Channel.CONTENT, "#y")]
    assert text.matched == "##"


def test_the_end_tokens_text_is_dropped_unless_asked_for() -> None:
    end = frozenset({ord("Z")})
    groups = [[ord("a"), ord("Z")]]
    dropped = summary(run(choice([], chat=False, end_ids=end), groups))
    kept = summary(run(choice([], chat=False, end_ids=end, include_stop=True), groups))
    assert dropped == ([(Channel.CONTENT, "a")], [(ord("a"), 0), (ord("Z"), 1)])
    assert kept[0] == [(Channel.CONTENT, "aZ")]


def test_tokens_before_min_tokens_are_not_searched() -> None:
    text = choice(["a"], chat=False, min_tokens=2)
    runs, _ = summary(run(text, [[ord("a")], [ord("a")], [ord("b")], [ord("a")]]))
    assert runs == [(Channel.CONTENT, "aab")]
    assert text.matched == "a"


def test_reasoning_tokens_are_counted_until_the_channel_ends() -> None:
    text = choice([])
    ids = TOKENIZER.encode("ab<|close|>think<|sep|><|open|>response<|sep|>c", allow_special=True)
    run(text, [ids])
    assert text.n_reasoning_tokens == ids.index(CONTROL.sep) + 1
