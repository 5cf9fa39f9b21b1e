"""The text of one choice: tokens in, pieces of its channels out.

Joins the channel parser, the incremental UTF-8 decoder and the stop search, and remembers which token's text ends in
which piece, so that log probabilities and ids travel with the text they belong to. Law: for every grouping of the
tokens the texts per channel, the tokens in order and `matched` are the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from k3.types import TokenEvent
from router.text.detokenize import Utf8Stream
from router.text.reasoning import Channel, ChannelParser, Chunk
from router.text.stop import StopAutomaton, StopStream
from router.text.tokenizer import Tokenizer


class TextToken(NamedTuple):
    """A token and where its text begins, characters from the start of the choice."""

    event: TokenEvent
    offset: int


class Piece(NamedTuple):
    """Text of one channel, and the tokens whose text ends in it."""

    channel: Channel
    text: str
    tokens: tuple[TextToken, ...] = ()


class PlainParser:
    """No channels: every token is content. Specials are dropped or written out."""

    channel = Channel.CONTENT

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens

    def push(self, token_id: int) -> list[Chunk]:
        """The token's bytes."""
        if self._skip_special and self._tokenizer.is_special(token_id):
            return []
        return [Chunk(Channel.CONTENT, self._tokenizer.token_bytes(token_id))]

    def flush(self) -> list[Chunk]:
        """Nothing is ever held."""
        return []


class ChoiceText:
    """Text of one choice.

    end_ids: ids that end the generation; their text is dropped unless `include_stop`.
    min_tokens: text of the tokens before that many is not searched for stop strings.
    """

    def __init__(
        self,
        parser: ChannelParser | PlainParser,
        automaton: StopAutomaton | None,
        *,
        end_ids: frozenset[int] = frozenset(),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._parser = parser
        self._automaton = automaton
        self._end_ids = end_ids
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._utf8 = Utf8Stream()
        self._stop = self._new_stop()
        self._channel = Channel.CONTENT  # of the text in the decoder and the stop search
        self._pending: deque[tuple[TextToken, int]] = deque()  # with the offset where the text ends
        self._n_produced = 0  # characters before the stop search
        self._n_released = 0  # characters of pieces
        self.n_tokens = 0
        self.n_reasoning_tokens = 0
        self.matched: str | None = None

    def push(self, tokens: Sequence[TokenEvent]) -> list[Piece]:
        """Pieces released by these tokens; tokens after a stop string are not kept."""
        pieces: list[Piece] = []
        for event in tokens:
            if self.matched is not None:
                break
            self._push_token(event, pieces)
        return self._with_tokens(pieces)

    def finish(self) -> list[Piece]:
        """Everything still held. A stop string may still match here."""
        pieces: list[Piece] = []
        for chunk in self._parser.flush():
            self._push_chunk(chunk, pieces)
        self._flush_channel(pieces)
        self._n_released = self._n_produced + 1  # nothing more will come: release every token
        if self._pending and not pieces:
            pieces.append(Piece(self._channel, ""))
        return self._with_tokens(pieces)

    def _push_token(self, event: TokenEvent, pieces: list[Piece]) -> None:
        start = self._n_produced
        self.n_tokens += 1
        if self._parser.channel is Channel.REASONING:
            self.n_reasoning_tokens += 1
        if event.id not in self._end_ids or self._include_stop:
            for chunk in self._parser.push(event.id):
                self._push_chunk(chunk, pieces)
        end = self._n_produced + (1 if self._utf8.is_holding else 0)
        self._pending.append((TextToken(event, start), end))

    def _push_chunk(self, chunk: Chunk, pieces: list[Piece]) -> None:
        if chunk.channel is not self._channel:
            self._flush_channel(pieces)
            self._channel = chunk.channel
        self._search(self._utf8.push(chunk.data), pieces)

    def _flush_channel(self, pieces: list[Piece]) -> None:
        """Stop strings do not span channels: what is held belongs to the channel that ends."""
        self._search(self._utf8.flush(), pieces)
        if self._stop is not None and self.matched is None:
            self._release(self._stop.flush(), pieces)

    def _search(self, text: str, pieces: list[Piece]) -> None:
        self._n_produced += len(text)
        if self.matched is not None:
            return
        if self._stop is None or self.n_tokens <= self._min_tokens:
            self._release(text, pieces)
            return
        self._release(self._stop.push(text), pieces)
        self.matched = self._stop.matched

    def _release(self, text: str, pieces: list[Piece]) -> None:
        if not text:
            return
        self._n_released += len(text)
        if pieces and pieces[-1].channel is self._channel:
            pieces[-1] = Piece(self._channel, pieces[-1].text + text)
        else:
            pieces.append(Piece(self._channel, text))

    def _with_tokens(self, pieces: list[Piece]) -> list[Piece]:
        """Attach to every piece the tokens whose text ends in it."""
        released = self._n_released - sum(len(piece.text) for piece in pieces)
        for index, piece in enumerate(pieces):
            released += len(piece.text)
            tokens: list[TextToken] = []
            while self._pending and self._pending[0][1] <= released:
                tokens.append(self._pending.popleft()[0])
            pieces[index] = piece._replace(tokens=tuple(tokens))
        return pieces

    def _new_stop(self) -> StopStream | None:
        if self._automaton is None:
            return None
        return StopStream(self._automaton, include_stop=self._include_stop)
