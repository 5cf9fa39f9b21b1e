"""Chat messages to prompt segments, in K3's order and structure.

    message = open("message", role=...) body close("message") end_of_msg
    prompt  = tool declaration, thinking effort, conversation, tool choice, response format, generation prompt

Segments are encoded one by one, so their boundaries are part of the format: an open tag is `open`, its name, four
segments per attribute, `sep`. Only control tokens may become special tokens; what users write never does.
Golden: k3/chat.json.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from router.text.chat_format import ChatFormat
from router.text.reasoning import Channel
from router.text.tokenizer import Segment

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What besides the messages shapes a prompt; None = not given."""

    tools: Sequence[Mapping[str, Any]] = ()
    thinking: bool = True
    thinking_effort: str | None = None
    tool_choice: str | None = None
    response_format: Mapping[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered prompt. `start` is the channel the model continues in, None outside of all."""

    segments: tuple[Segment, ...]
    start: Channel | None

    @property
    def text(self) -> str:
        """The prompt written out."""
        return "".join(segment.text for segment in self.segments)


class Template:
    """Renders chats of one model."""

    def __init__(self, chat_format: ChatFormat) -> None:
        self._format = chat_format
        self._control = {
            name: Segment(text, is_control=True) for name, text in chat_format.control_text.items()
        }

    def render(self, messages: Sequence[Message], options: ChatOptions) -> Prompt:
        """The prompt of a conversation. With `continue_final_message` the last assistant turn stays open."""
        segments: list[Segment] = []
        words = self._format
        if options.tools:
            segments += self._system(
                "tool-declare", _fill(words.tool_declaration, tools=options.tools)
            )
        if options.thinking and options.thinking_effort is not None:
            text = words.thinking_effort.replace("{effort}", options.thinking_effort)
            segments += self._system("thinking-effort", text)
        last = len(messages) - 1
        for index, message in enumerate(_with_sorted_results(messages)):
            is_open = options.continue_final_message and index == last
            segments += self._message(message, options.thinking, is_open=is_open)
        segments += self._requests(options)
        if options.continue_final_message:
            return Prompt(tuple(segments), _open_channel(messages[-1], options.thinking))
        if not options.add_generation_prompt:
            return Prompt(tuple(segments), None)
        start = Channel.REASONING if options.thinking else Channel.CONTENT
        segments += self._open("message", role="assistant")
        segments += self._open(start.value)
        return Prompt(tuple(segments), start)

    def _requests(self, options: ChatOptions) -> Iterator[Segment]:
        """What the caller demands of the answer, after the conversation."""
        sentence = self._format.tool_choice.get(options.tool_choice or "")
        if sentence is not None:
            yield from self._system("tool-choice", sentence)
        wanted = options.response_format or {}
        sentence = self._format.response_format.get(str(wanted.get("type")))
        if sentence is not None:
            schema = wanted.get("json_schema", {}).get("schema")
            yield from self._system("response-format", _fill(sentence, schema=schema))

    def _open(self, tag: str, **attributes: str) -> Iterator[Segment]:
        yield self._control["open"]
        yield Segment(tag)
        for name, value in attributes.items():
            yield Segment(f" {name}")
            yield Segment('="')
            yield Segment(value.replace("&", "&amp;").replace('"', "&quot;"))
            yield Segment('"')
        yield self._control["sep"]

    def _close(self, tag: str) -> Iterator[Segment]:
        yield self._control["close"]
        yield Segment(tag)
        yield self._control["sep"]

    def _end_message(self) -> Iterator[Segment]:
        yield from self._close("message")
        yield self._control["end_of_msg"]

    def _system(self, kind: str, text: str) -> Iterator[Segment]:
        yield from self._open("message", role="system", type=kind)
        yield Segment(text)
        yield from self._end_message()

    def _message(self, message: Message, thinking: bool, *, is_open: bool) -> Iterator[Segment]:
        role = "system" if message["role"] == "developer" else message["role"]
        if role == "system" and message.get("tools"):
            sentence = self._format.dynamic_tool_declaration
            yield from self._system("tool-declare", _fill(sentence, tools=message["tools"]))
            return
        attributes = {"role": role}
        if role == "tool":
            attributes |= {"tool": message["tool"], "index": str(message["index"])}
        elif message.get("name"):
            attributes["name"] = message["name"]
        yield from self._open("message", **attributes)
        if role == "assistant":
            yield from self._assistant(message, thinking, is_open=is_open)
        else:
            yield from _body(message.get("content"))
        if not is_open:
            yield from self._end_message()

    def _assistant(self, message: Message, thinking: bool, *, is_open: bool) -> Iterator[Segment]:
        reasoning = message.get("reasoning_content") or ""
        channel = _open_channel(message, thinking) if is_open else None
        if thinking:
            yield from self._open("think")
            yield from _body(reasoning)
            if channel is Channel.REASONING:
                return
            yield from self._close("think")
        yield from self._open("response")
        yield from _body(message.get("content"))
        if channel is Channel.CONTENT:
            return
        yield from self._close("response")
        calls = message.get("tool_calls")
        if calls:
            yield from self._open("tools")
            for index, call in enumerate(calls, start=1):
                yield from self._call(call["function"], index)
            yield from self._close("tools")

    def _call(self, function: Mapping[str, Any], index: int) -> Iterator[Segment]:
        yield from self._open("call", tool=function["name"], index=str(index))
        arguments = _arguments(function.get("arguments"))
        if isinstance(arguments, str):
            yield from self._open("json", type="object")
            yield Segment(arguments)
            yield from self._close("json")
        else:
            for key, value in arguments.items():
                yield from self._open("argument", key=key, type=_type_name(value))
                yield from _body(value if isinstance(value, str) else _json(value))
                yield from self._close("argument")
        yield from self._close("call")


def _body(content: str | Sequence[Mapping[str, Any]] | None) -> Iterator[Segment]:
    """Text of a message; every part is a segment of its own, empty text is none."""
    texts = (
        [content or ""] if isinstance(content, (str, type(None))) else [p["text"] for p in content]
    )
    yield from (Segment(text) for text in texts if text)


def _open_channel(message: Message, thinking: bool) -> Channel:
    """Where an unfinished assistant turn goes on: in its content when it has any, else still thinking."""
    return Channel.REASONING if thinking and not message.get("content") else Channel.CONTENT


def _with_sorted_results(messages: Sequence[Message]) -> list[Message]:
    """Tool results get the name and number of their call, and its order when every id matches."""
    result: list[Message] = []
    calls: Sequence[Mapping[str, Any]] = ()
    at = 0
    while at < len(messages):
        if messages[at]["role"] != "tool":
            calls = messages[at].get("tool_calls") or ()
            result.append(messages[at])
            at += 1
            continue
        end = at
        while end < len(messages) and messages[end]["role"] == "tool":
            end += 1
        result += _numbered(messages[at:end], calls)
        at = end
    return result


def _numbered(results: Sequence[Message], calls: Sequence[Mapping[str, Any]]) -> list[Message]:
    order = {call.get("id"): index for index, call in enumerate(calls)}
    ids = [result.get("tool_call_id") for result in results]
    if all(call_id in order for call_id in ids):
        results = sorted(results, key=lambda result: order[result.get("tool_call_id")])
        places = [order[result.get("tool_call_id")] for result in results]
    else:
        places = list(range(len(results)))
    return [
        {**result, "index": place + 1, "tool": _tool_name(result, calls, place)}
        for result, place in zip(results, places, strict=True)
    ]


def _tool_name(result: Message, calls: Sequence[Mapping[str, Any]], place: int) -> str:
    if place < len(calls):
        return calls[place]["function"]["name"]
    return result.get("name") or ""


def _arguments(arguments: str | Mapping[str, Any] | None) -> Mapping[str, Any] | str:
    """Arguments of a call; a string that is no JSON object stays as it is."""
    if not arguments:
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed: object = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return cast("dict[str, Any]", parsed) if isinstance(parsed, dict) else arguments


def _type_name(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _fill(sentence: str, **values: object) -> str:
    """Put compact, key-sorted JSON into the placeholders."""
    for name, value in values.items():
        text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
        sentence = sentence.replace(f"{{{name}}}", text)
    return sentence
