"""K3's chat form for training documents: each segment is encoded on its own, exactly as the router renders it.

`ChatCodec` caches the tags. A document starts with `prompt(...)`, continues with `answer(...)`, further
questions with `user(...)`. Golden: k3/chat.json.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tiktoken

from training.tokenizer import Special

CHAT_FORMAT = Path(__file__).parent.parent / "k3" / "assets" / "tiny" / "chat_format.json"


class ChatCodec:
    """Renders turns to ids for one tokenizer."""

    def __init__(self, encoding: tiktoken.Encoding) -> None:
        self.encoding = encoding
        self.special = Special(encoding.n_vocab - 256)
        built_in = json.loads(CHAT_FORMAT.read_text(encoding="utf-8"))["messages"]
        self.declaration = str(built_in["tool_declaration"])
        self._tags: dict[tuple[str, tuple[tuple[str, str], ...]], list[int]] = {}

    def text(self, text: str) -> list[int]:
        """Ids of one segment of ordinary text."""
        return self.encoding.encode_ordinary(text)

    def open(self, tag: str, **attributes: str) -> list[int]:
        """Opening tag: name and, per attribute, four segments."""
        key = (tag, tuple(attributes.items()))
        ids = self._tags.get(key)
        if ids is None:
            ids = [self.special.open, *self.text(tag)]
            for name, value in attributes.items():
                escaped = value.replace("&", "&amp;").replace('"', "&quot;")
                for segment in (f" {name}", '="', escaped, '"'):
                    ids += self.text(segment)
            ids.append(self.special.sep)
            self._tags[key] = ids
        return ids

    def close(self, tag: str) -> list[int]:
        """Closing tag."""
        key = ("/" + tag, ())
        ids = self._tags.get(key)
        if ids is None:
            ids = [self.special.close, *self.text(tag), self.special.sep]
            self._tags[key] = ids
        return ids

    def message(self, body: list[int], **attributes: str) -> list[int]:
        """A whole message around an encoded body."""
        return [
            *self.open("message", **attributes),
            *body,
            *self.close("message"),
            self.special.end_of_msg,
        ]

    def user(self, body: list[int]) -> list[int]:
        """A user message and the generation prompt after it."""
        return [
            *self.message(body, role="user"),
            *self.open("message", role="assistant"),
            *self.open("think"),
        ]

    def tools(self, tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """The tool declaration message."""
        listing = json.dumps(tools, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
        body = self.text(self.declaration.replace("{tools}", listing))
        return self.message(body, role="system", type="tool-declare")

    def system(self, text: str) -> list[int]:
        """A system message."""
        return self.message(self.text(text), role="system")

    def answer(self, think: str, response: str) -> list[int]:
        """What the model writes after the generation prompt, up to and with the eos."""
        return [
            *(self.text(think) if think else ()),
            *self.close("think"),
            *self.open("response"),
            *self.text(response),
            *self.close("response"),
            *self.close("message"),
            self.special.end_of_msg,
        ]

    def call(self, name: str, arguments: Mapping[str, str | int | float | bool]) -> list[int]:
        """An answer that calls one tool."""
        ids = [
            *self.close("think"),
            *self.open("response"),
            *self.close("response"),
            *self.open("tools"),
        ]
        ids += self.open("call", tool=name, index="1")
        for key, value in arguments.items():
            match value:
                case str():
                    kind, raw = "string", value
                case bool():
                    kind, raw = "boolean", json.dumps(value)
                case int() | float():
                    kind, raw = "number", json.dumps(value)
            ids += [
                *self.open("argument", key=key, type=kind),
                *self.text(raw),
                *self.close("argument"),
            ]
        ids += [
            *self.close("call"),
            *self.close("tools"),
            *self.close("message"),
            self.special.end_of_msg,
        ]
        return ids

    def prompt(
        self, turns: Sequence[Mapping[str, str]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Ids of a conversation up to the generation prompt; roles system, user, assistant."""
        ids = self.tools(tools) if tools else []
        for turn in turns:
            match turn["role"]:
                case "assistant":
                    ids += [*self.open("message", role="assistant"), *self.open("think")]
                    ids += self.answer("", turn["content"])
                case role:
                    ids += self.message(self.text(turn["content"]), role=role)
        return [*ids, *self.open("message", role="assistant"), *self.open("think")]
