"""The tokenizer files for clients: `transformers` gives the same ids and renders the same prompts as the router."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.text.chat_format import load_chat_format
from router.text.export import export
from router.text.template import ChatOptions, Template

TINY = Path(__file__).parents[3] / "k3" / "assets" / "tiny"
GOLDEN = Path(__file__).parents[2] / "golden" / "k3" / "chat.json"
PLAIN_CASES = [
    case
    for case in json.loads(GOLDEN.read_text())
    if not case["tools"]
    and not any("tools" in m or "tool_calls" in m for m in case["messages"])
    and not {"response_format", "tool_choice"} & case["kwargs"].keys()
]
TOKENIZER, FORMAT = load_chat_format(TINY)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60) | st.text(
    "ab AB012'stle.\n\t 汉字é\u0301\U0001f600", max_size=60
)


@pytest.fixture(scope="module")
def twin() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(TINY)


def test_the_shipped_files_are_what_the_export_writes(tmp_path: Path) -> None:
    for name in ("tiktoken.model", "chat_format.json", "config.json"):
        (tmp_path / name).write_bytes((TINY / name).read_bytes())
    for path in export(tmp_path):
        assert path.read_bytes() == (TINY / path.name).read_bytes(), path.name


@pytest.mark.parametrize("case", PLAIN_CASES, ids=[case["name"] for case in PLAIN_CASES])
def test_template_of_the_twin_renders_the_text_of_plain_chats(twin: Any, case: Any) -> None:
    kwargs = {"add_generation_prompt": True, **case["kwargs"]}
    assert twin.apply_chat_template(case["messages"], tokenize=False, **kwargs) == case["rendered"]


@pytest.mark.parametrize(
    "case",
    # Ids differ by design where a user writes a control token, and where text parts meet inside a word.
    [case for case in PLAIN_CASES if case["name"] not in ("injection", "parts")],
    ids=lambda case: case["name"],
)
def test_ids_of_the_twin_are_those_of_the_segment_renderer(twin: Any, case: Any) -> None:
    prompt = Template(FORMAT).render(case["messages"], ChatOptions(**case["kwargs"]))
    kwargs = {"add_generation_prompt": True, **case["kwargs"]}
    ids = twin.apply_chat_template(case["messages"], tokenize=True, return_dict=False, **kwargs)
    assert list(ids) == TOKENIZER.encode_segments(prompt.segments)


def test_twin_refuses_chats_with_tools(twin: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    with pytest.raises(Exception, match="rendered by the server"):
        twin.apply_chat_template([{"role": "user", "content": "x"}], tools=[tool], tokenize=False)


@given(TEXTS)
def test_ids_of_plain_text_are_equal(text: str) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    twin = _loaded(tokenizers)
    assert twin.encode(text, add_special_tokens=False).ids == TOKENIZER.encode(
        text, allow_special=True
    )


@cache
def _loaded(tokenizers: Any) -> Any:
    return tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json"))
