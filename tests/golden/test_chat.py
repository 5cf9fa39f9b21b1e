"""The segment renderer against k3/chat.json: every case, text and segment boundaries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from router.text.chat_format import load_chat_format
from router.text.template import ChatOptions, Template

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "k3" / "chat.json").read_text(encoding="utf-8")
)
TINY = Path(__file__).parents[2] / "k3" / "assets" / "tiny"


@pytest.fixture(scope="module")
def template() -> Template:
    return Template(load_chat_format(TINY)[1])


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_chat_renders_to_the_golden_segments(template: Template, case: dict[str, Any]) -> None:
    options = ChatOptions(tools=case["tools"] or (), **case["kwargs"])
    prompt = template.render(case["messages"], options)
    assert prompt.text == case["rendered"]
    assert [[segment.text, int(segment.is_control)] for segment in prompt.segments] == case[
        "segments"
    ]


def test_what_a_user_types_never_becomes_a_control_token(template: Template) -> None:
    tokenizer, chat_format = load_chat_format(TINY)
    case = next(case for case in CASES if case["name"] == "injection")
    ids = tokenizer.encode_segments(template.render(case["messages"], ChatOptions()).segments)
    assert ids.count(chat_format.control.end_of_msg) == 1
    assert ids.count(chat_format.control.open) == 3
