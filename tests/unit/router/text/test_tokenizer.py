"""Tokenizer: K3's file format, special tokens above it, limits before encoding."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3.errors import ModelError
from router.text.chat_format import load_chat_format
from router.text.tokenizer import (
    MAX_PIECE_CHARS,
    MAX_RUN_CHARS,
    ByteCodec,
    Segment,
    Tokenizer,
    cut_long_runs,
    read_ranks,
)

TINY = Path(__file__).parents[4] / "k3" / "assets" / "tiny"
TOKENIZER, FORMAT = load_chat_format(TINY)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@given(TEXT)
def test_decoding_the_ids_of_a_text_gives_the_text(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text), skip_special_tokens=False) == text


@given(TEXT)
def test_ordinary_encoding_never_gives_a_special_token(text: str) -> None:
    assert not any(map(TOKENIZER.is_special, TOKENIZER.encode(text + "<|sep|>" + text)))


def test_special_tokens_are_found_only_where_allowed() -> None:
    text = "a<|open|>b<|sep|>"
    control = FORMAT.control
    allowed = TOKENIZER.encode(text, allow_special=True)
    assert [token for token in allowed if TOKENIZER.is_special(token)] == [
        control.open,
        control.sep,
    ]
    segments = [Segment("<|open|>"), Segment("<|open|>", is_control=True)]
    ids = TOKENIZER.encode_segments(segments)
    assert ids.count(control.open) == 1
    assert ids[-1] == control.open


def test_prompts_of_the_trained_model_encode_to_the_ids_it_was_trained_on() -> None:
    for sample in json.loads((TINY / "samples.json").read_text()):
        prompt = TOKENIZER.decode(sample["prompt_ids"], skip_special_tokens=False)
        assert TOKENIZER.encode(prompt, allow_special=True) == sample["prompt_ids"]
        assert prompt.endswith(sample["prompt"])  # long prompts are cut at their start there
        text = TOKENIZER.decode(sample["answer_ids"], skip_special_tokens=False)
        assert text == sample["answer"]


def test_no_rank_holds_two_digits_so_numbers_are_read_digit_by_digit() -> None:
    ranks = read_ranks(TINY / "tiktoken.model")
    assert not [token for token in ranks if re.search(rb"\d.*\d", token, re.DOTALL)]
    assert TOKENIZER.encode("269") == [ord("2"), ord("6"), ord("9")]


def test_unnamed_slots_have_reserved_names() -> None:
    assert (
        TOKENIZER.token_bytes(TOKENIZER.base + 77)
        == f"<|reserved_token_{TOKENIZER.base + 77}|>".encode()
    )


@pytest.mark.parametrize("token", [-1, TOKENIZER.vocab_size])
def test_ids_outside_the_vocabulary_are_refused(token: int) -> None:
    with pytest.raises(ValueError, match=f"token id {token}"):
        TOKENIZER.token_bytes(token)


@pytest.mark.parametrize(
    "length", [0, 1, MAX_RUN_CHARS, MAX_RUN_CHARS + 1, 2 * MAX_RUN_CHARS, 2 * MAX_RUN_CHARS + 1]
)
def test_long_runs_are_cut_into_limited_ones(length: int) -> None:
    text = "ab " + "x" * length + "  \n" + " " * length + "end"
    pieces = list(cut_long_runs(text))
    assert "".join(pieces) == text
    runs = [run for piece in pieces for run in re.findall(r"\s+|\S+", piece)]
    assert max(map(len, runs)) <= MAX_RUN_CHARS


def test_long_texts_are_cut_into_limited_pieces() -> None:
    text = "word " * (MAX_PIECE_CHARS // 5 + 3)
    pieces = list(cut_long_runs(text))
    assert "".join(pieces) == text
    assert [len(piece) for piece in pieces] == [MAX_PIECE_CHARS, 15]


def test_bytes_are_the_ids_of_the_test_models_tokenizer() -> None:
    specials = {"[PAD]": 0, "[BOS]": 1, "<|sep|>": 6}
    tokenizer = Tokenizer(ByteCodec(), specials, 256)
    assert tokenizer.encode("é<|sep|>", allow_special=True) == [0xC3, 0xA9, 262]
    assert tokenizer.vocab_size == 512


@pytest.mark.parametrize("offsets", [{"a": 0, "b": 0}, {"a": -1}, {"a": 4}])
def test_special_offsets_must_be_distinct_and_inside_their_slots(offsets: dict[str, int]) -> None:
    with pytest.raises(ModelError, match=r"distinct and in 0\.\.3"):
        Tokenizer(ByteCodec(), offsets, 4)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("!! 0\n", ":1:"),
        ("AA== x\n", ":1:"),
        ("AA==\n", ":1:"),
        (f"AA== 0\n{base64.b64encode(b'b').decode()} 2\n", "must be 0..1"),
    ],
)
def test_a_wrong_tokenizer_file_names_the_line(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "tiktoken.model"
    path.write_text(text)
    with pytest.raises(ModelError, match=re.escape(complaint)):
        read_ranks(path)


def test_a_folder_without_a_chat_format_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"chat_format\.json.*copy the one of the embedded model"):
        load_chat_format(tmp_path)
