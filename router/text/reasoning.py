"""Channels of an answer: splits the generated tokens into reasoning, content and tool text.

A model answers in tags built from three control tokens: `open name attributes sep ... close name sep`. Names and text
are ordinary tokens in any split. The parser is a total function of the token sequence: whatever the model emits, no
text is lost, and the result does not depend on how tokens are grouped. Tags the parser does not know are dropped inside
reasoning and content; inside tools everything is kept, control tokens written out.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from router.text.tokenizer import ControlTokens, Tokenizer

MAX_TAG_BYTES = 1024  # longer "tags" are text that follows a stray control token


class Channel(Enum):
    """Where text belongs. Values are the tag names."""

    REASONING = "think"
    CONTENT = "response"
    TOOLS = "tools"


class Chunk(NamedTuple):
    """Bytes for one channel."""

    channel: Channel
    data: bytes


class ChannelParser:
    """Token ids in, chunks out. Text outside every channel counts as content; `channel` is None there.

    skip_special_tokens: drop specials other than the tag tokens instead of writing them out.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        control: ControlTokens,
        start: Channel | None,
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._control = control
        self.channel = start
        self._skip_special = skip_special_tokens
        self._tag_token: int | None = None  # open or close while inside a tag
        self._tag = b""

    def push(self, token_id: int) -> list[Chunk]:
        """Chunks completed by one token."""
        control = self._control
        if token_id in (control.open, control.close):
            chunks = self._abandon_tag()
            self._tag_token = token_id
            return chunks
        if token_id == control.sep:
            return self._end_tag()
        if self._tokenizer.is_special(token_id):
            if self._skip_special:
                return []
            return [*self._abandon_tag(), *self._emit(self._tokenizer.token_bytes(token_id))]
        data = self._tokenizer.token_bytes(token_id)
        if self._tag_token is None:
            return self._emit(data)
        self._tag += data
        return self._abandon_tag() if len(self._tag) > MAX_TAG_BYTES else []

    def flush(self) -> list[Chunk]:
        """What an unfinished tag still holds, at the end of the answer."""
        return self._abandon_tag()

    def _emit(self, data: bytes) -> list[Chunk]:
        return [Chunk(self.channel or Channel.CONTENT, data)] if data else []

    def _written(self, token_id: int | None) -> bytes:
        """A tag token's own text, where it is kept."""
        if token_id is None or self.channel is not Channel.TOOLS:
            return b""
        return self._tokenizer.token_bytes(token_id)

    def _abandon_tag(self) -> list[Chunk]:
        """The open tag turned out to be text."""
        data = self._written(self._tag_token) + self._tag
        self._tag_token, self._tag = None, b""
        return self._emit(data)

    def _end_tag(self) -> list[Chunk]:
        token, tag = self._tag_token, self._tag
        if token is None:
            return self._emit(self._written(self._control.sep))
        name = tag.split(b" ", 1)[0].decode("utf-8", "replace")
        if token == self._control.close and name in (self._name(), "message"):
            self._tag_token, self._tag, self.channel = None, b"", None
            return []
        opened = next((channel for channel in Channel if channel.value == name), None)
        if token == self._control.open and self.channel is not Channel.TOOLS and opened:
            self._tag_token, self._tag, self.channel = None, b"", opened
            return []
        if self.channel is Channel.TOOLS:
            return [*self._abandon_tag(), *self._emit(self._written(self._control.sep))]
        self._tag_token, self._tag = None, b""
        return []

    def _name(self) -> str | None:
        return self.channel.value if self.channel else None
