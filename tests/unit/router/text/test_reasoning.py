"""Channels of an answer: what the model says is split by its tags, whatever it says, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.text.chat_format import load_chat_format
from router.text.reasoning import MAX_TAG_BYTES, Channel, ChannelParser
from router.text.template import ChatOptions, Template

TINY = Path(__file__).parents[4] / "k3" / "assets" / "tiny"
TOKENIZER, FORMAT = load_chat_format(TINY)
CONTROL = FORMAT.control
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
CONTROLS = st.sampled_from(
    [CONTROL.open, CONTROL.close, CONTROL.sep, CONTROL.end_of_msg, CONTROL.pad]
)
WORDS = st.sampled_from(["think", "response", "tools", "message", 'call tool="f"', "x", " "])
ANY_TOKENS = st.lists(
    CONTROLS.map(lambda token: [token]) | WORDS.map(TOKENIZER.encode) | TEXT.map(TOKENIZER.encode),
    max_size=20,
).map(lambda groups: [token for group in groups for token in group])


def parse(
    ids: list[int], start: Channel | None = Channel.REASONING, *, skip: bool = True
) -> dict[Channel, str]:
    parser = ChannelParser(TOKENIZER, CONTROL, start, skip_special_tokens=skip)
    chunks = [chunk for token in ids for chunk in parser.push(token)] + parser.flush()
    texts = dict.fromkeys(Channel, b"")
    for chunk in chunks:
        texts[chunk.channel] += chunk.data
    return {channel: data.decode("utf-8", "replace") for channel, data in texts.items() if data}


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, allow_special=True)


@given(TEXT, TEXT)
def test_a_rendered_assistant_turn_parses_back_into_itself(reasoning: str, content: str) -> None:
    turn = {"role": "assistant", "reasoning_content": reasoning, "content": content}
    template = Template(FORMAT)
    whole = template.render([turn], ChatOptions(add_generation_prompt=False)).segments
    opened = template.render([], ChatOptions()).segments  # what a generation prompt already says
    ids = TOKENIZER.encode_segments(whole)[len(TOKENIZER.encode_segments(opened)) :]
    expected = {Channel.REASONING: reasoning, Channel.CONTENT: content}
    assert parse(ids) == {channel: text for channel, text in expected.items() if text}


@given(ANY_TOKENS, st.sampled_from([None, *Channel]))
def test_whatever_the_model_says_is_parsed_and_the_split_of_words_does_not_matter(
    ids: list[int], start: Channel | None
) -> None:
    by_bytes: list[int] = []
    for token in ids:
        split = TOKENIZER.is_special(token)
        by_bytes += [token] if split else list(TOKENIZER.token_bytes(token))  # ids 0..255 are bytes
    assert parse(ids, start) == parse(by_bytes, start)


@given(TEXT, st.sampled_from([None, *Channel]))
def test_text_without_tags_is_never_lost(text: str, start: Channel | None) -> None:
    channel = start or Channel.CONTENT
    assert parse(TOKENIZER.encode(text), start) == ({channel: text} if text else {})


def test_a_tag_that_never_ends_is_text_after_all() -> None:
    assert parse(ids_of("a<|open|>unfinished")) == {Channel.REASONING: "aunfinished"}
    long = "x" * (MAX_TAG_BYTES + 1)
    assert parse([CONTROL.open, *TOKENIZER.encode(long)]) == {Channel.REASONING: long}


def test_unknown_tags_inside_text_are_dropped() -> None:
    ids = ids_of("a<|open|>b<|sep|>c<|close|>response<|sep|>d")
    assert parse(ids) == {Channel.REASONING: "acd"}


def test_tool_calls_are_kept_as_they_were_written() -> None:
    argument = '<|open|>argument key="a" type="string"<|sep|>x<|close|>argument<|sep|>'
    call = f'<|open|>call tool="f" index="1"<|sep|>{argument}<|close|>call<|sep|>'
    ids = ids_of(f"<|close|>think<|sep|><|open|>tools<|sep|>{call}<|close|>tools<|sep|>")
    assert parse(ids) == {Channel.TOOLS: call}


@pytest.mark.parametrize("skip", [True, False])
def test_other_special_tokens_are_dropped_or_written_out(skip: bool) -> None:
    ids = ids_of("a[PAD]b")
    assert parse(ids, skip=skip) == {Channel.REASONING: "ab" if skip else "a[PAD]b"}
