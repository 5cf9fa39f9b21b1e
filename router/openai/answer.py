"""JSON of answers: whole bodies and stream chunks of both endpoints, from updates of a generation. Pure.

Golden shapes are OpenAI's; extensions are reasoning_content, stop_reason and token ids. A chunk never mixes text with
a finish reason in chat; log probabilities travel with the text of their tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from router.openai.generation import Counts, End, Update
from router.openai.params import Job
from router.text.output import Piece, TextToken
from router.text.reasoning import Channel
from router.text.tokenizer import Tokenizer

Json = dict[str, Any]
MINUS_INFINITY = -9999.0


@dataclass(frozen=True, slots=True)
class Head:
    """What all chunks of an answer share."""

    id: str
    created: int
    model: str
    fingerprint: str

    def envelope(self, kind: str, choices: Sequence[Json]) -> Json:
        """An answer object around choices."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": list(choices),
        }


class Answer(Protocol):
    """Shapes of one endpoint."""

    def opening(self, index: int) -> list[Json]:
        """Chunks before the first text of a choice."""
        ...

    def chunks(self, update: Update) -> list[Json]:
        """Chunks of one update; each is an envelope."""
        ...

    def usage_chunk(self, counts: Counts) -> Json:
        """The last chunk, with usage and no choices."""
        ...

    def body(self, updates: Sequence[Sequence[Update]], counts: Counts) -> Json:
        """The whole answer, from the updates of every choice in order."""
        ...


def usage(counts: Counts) -> Json:
    """Usage object."""
    return {
        "prompt_tokens": counts.prompt_tokens,
        "completion_tokens": counts.completion_tokens,
        "total_tokens": counts.prompt_tokens + counts.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": counts.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": counts.reasoning_tokens,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def totals(counts: Counts) -> Json:
    """Usage, and how the drafts fared where that was asked for and there were any."""
    drafts = counts.speculation
    if drafts is None:
        return {"usage": usage(counts)}
    statistics: Json = {
        "num_spec_tokens": len(drafts.histogram) - 1,
        "num_spec_steps": drafts.n_steps,
        "num_draft_tokens": drafts.n_drafts,
        "num_accepted_draft_tokens": drafts.n_accepted,
        "mean_acceptance_length": 1 + drafts.n_accepted / max(1, drafts.n_steps),
        "draft_acceptance_rate": drafts.n_accepted / max(1, drafts.n_drafts),
        "acceptance_histogram": list(drafts.histogram),
    }
    if counts.steps is not None:
        statistics["per_step_accepted"] = [step.n_accepted for step in counts.steps]
        statistics["per_step_drafted"] = [step.n_drafts for step in counts.steps]
    return {"usage": usage(counts), "metrics": {"speculative_decoding": statistics}}


class ChatAnswer:
    """chat.completion and chat.completion.chunk."""

    def __init__(self, head: Head, job: Job, tokenizer: Tokenizer) -> None:
        self._head = head
        self._job = job
        self._tokenizer = tokenizer

    def opening(self, index: int) -> list[Json]:
        """The role."""
        choice = self._choice(index, {"role": "assistant", "content": ""}, ())
        chunk = self._head.envelope("chat.completion.chunk", [choice])
        if self._job.return_token_ids:
            chunk["prompt_token_ids"] = list(self._job.prompts[0])
        return [chunk]

    def chunks(self, update: Update) -> list[Json]:
        """A delta per piece, then the finish by itself."""
        pieces, rest = split_rest(update)
        choices = [
            self._choice(update.index, {_field(piece.channel): piece.text}, piece.tokens)
            for piece in pieces
        ]
        if update.end is not None:
            choices.append(self._choice(update.index, {}, rest, update.end))
        return [self._head.envelope("chat.completion.chunk", [choice]) for choice in choices]

    def usage_chunk(self, counts: Counts) -> Json:
        """No choices, only usage."""
        return self._head.envelope("chat.completion.chunk", []) | totals(counts)

    def body(self, updates: Sequence[Sequence[Update]], counts: Counts) -> Json:
        """The whole answer."""
        body = self._head.envelope(
            "chat.completion", [self._whole(index, news) for index, news in enumerate(updates)]
        )
        if self._job.return_token_ids:
            body["prompt_token_ids"] = list(self._job.prompts[0])
        return body | totals(counts)

    def _choice(
        self, index: int, delta: Json, tokens: Sequence[TextToken], end: End | None = None
    ) -> Json:
        choice: Json = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(tokens) if tokens else None,
            "finish_reason": end.finish_reason if end else None,
        }
        if end is not None:
            choice["stop_reason"] = end.stop_reason
        if self._job.return_token_ids:
            choice["token_ids"] = [token.event.id for token in tokens]
        return choice

    def _whole(self, index: int, updates: Sequence[Update]) -> Json:
        texts = {Channel.CONTENT: "", Channel.REASONING: "", Channel.TOOLS: ""}
        tokens = all_tokens(updates)
        for piece in all_pieces(updates):
            texts[piece.channel] += piece.text
        message: Json = {
            "role": "assistant",
            # Tools are not served: what the model says there must not be lost.
            "content": texts[Channel.CONTENT] + texts[Channel.TOOLS],
            "refusal": None,
        }
        if texts[Channel.REASONING]:
            message["reasoning_content"] = texts[Channel.REASONING]
        end = last_end(updates)
        choice: Json = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(tokens),
            "finish_reason": end.finish_reason,
            "stop_reason": end.stop_reason,
        }
        if self._job.return_token_ids:
            choice["token_ids"] = [token.event.id for token in tokens]
        return choice

    def _logprobs(self, tokens: Sequence[TextToken]) -> Json | None:
        if not self._job.logprobs.enabled:
            return None
        content: list[Json] = []
        for token in tokens:
            item = self._entry(token.event.id, token.event.logprob)
            item["top_logprobs"] = [self._entry(*entry) for entry in token.event.top]
            content.append(item)
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float | None) -> Json:
        data = self._tokenizer.token_bytes(token_id)
        return {"token": token_text(data), "bytes": list(data), "logprob": finite(logprob)}


class TextAnswer:
    """text_completion, whole and in chunks."""

    def __init__(self, head: Head, job: Job, tokenizer: Tokenizer) -> None:
        self._head = head
        self._job = job
        self._tokenizer = tokenizer

    def opening(self, index: int) -> list[Json]:
        """The prompt's ids when asked for, else nothing."""
        if not self._job.return_token_ids:
            return []
        choice = self._choice(index, "", ())
        choice["prompt_token_ids"] = self._prompt_ids(index)
        return [self._head.envelope("text_completion", [choice])]

    def chunks(self, update: Update) -> list[Json]:
        """A chunk per piece; the finish has its own, with what tokens are left."""
        pieces, rest = split_rest(update)
        choices = [self._choice(update.index, piece.text, piece.tokens) for piece in pieces]
        if update.end is not None:
            choices.append(self._choice(update.index, "", rest, update.end))
        return [self._head.envelope("text_completion", [choice]) for choice in choices]

    def usage_chunk(self, counts: Counts) -> Json:
        """No choices, only usage."""
        return self._head.envelope("text_completion", []) | totals(counts)

    def body(self, updates: Sequence[Sequence[Update]], counts: Counts) -> Json:
        """The whole answer."""
        choices = [
            self._choice(
                index,
                "".join(piece.text for piece in all_pieces(news)),
                all_tokens(news),
                last_end(news),
            )
            for index, news in enumerate(updates)
        ]
        if self._job.return_token_ids:
            for index, choice in enumerate(choices):
                choice["prompt_token_ids"] = self._prompt_ids(index)
        return self._head.envelope("text_completion", choices) | totals(counts)

    def _choice(
        self, index: int, text: str, tokens: Sequence[TextToken], end: End | None = None
    ) -> Json:
        choice: Json = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(tokens) if tokens else None,
            "finish_reason": end.finish_reason if end else None,
            "stop_reason": end.stop_reason if end else None,
        }
        if self._job.return_token_ids:
            choice["token_ids"] = [token.event.id for token in tokens]
        return choice

    def _prompt_ids(self, index: int) -> list[int]:
        return list(self._job.prompts[index // self._job.n])

    def _logprobs(self, tokens: Sequence[TextToken]) -> Json | None:
        if not self._job.logprobs.enabled:
            return None
        return {
            "tokens": [self._text(token.event.id) for token in tokens],
            "token_logprobs": [finite(token.event.logprob) for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": [token.offset for token in tokens],
        }

    def _top(self, token: TextToken) -> Mapping[str, float | None] | None:
        if self._job.logprobs.top == 0:
            return None
        top = {self._text(token_id): finite(logprob) for token_id, logprob in token.event.top}
        return top | {self._text(token.event.id): finite(token.event.logprob)}

    def _text(self, token_id: int) -> str:
        return token_text(self._tokenizer.token_bytes(token_id))


def split_rest(update: Update) -> tuple[list[Piece], Sequence[TextToken]]:
    """Pieces with text, and the tokens of a last piece without any: those go with the finish."""
    pieces = [piece for piece in update.pieces if piece.text]
    rest = [token for piece in update.pieces if not piece.text for token in piece.tokens]
    return pieces, rest


def all_pieces(updates: Iterable[Update]) -> Iterator[Piece]:
    """Pieces of a choice, in order."""
    for update in updates:
        yield from update.pieces


def all_tokens(updates: Iterable[Update]) -> list[TextToken]:
    """Tokens of a choice, in order."""
    return [token for piece in all_pieces(updates) for token in piece.tokens]


def last_end(updates: Sequence[Update]) -> End:
    """How a finished choice ended."""
    end = updates[-1].end
    assert end is not None
    return end


def token_text(data: bytes) -> str:
    """A token as text; what is no UTF-8 by itself is written `bytes:\\xe4\\xb8`."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def finite(logprob: float | None) -> float | None:
    """JSON has no infinity."""
    if logprob is None or math.isfinite(logprob):
        return logprob
    return MINUS_INFINITY


def _field(channel: Channel) -> str:
    return "reasoning_content" if channel is Channel.REASONING else "content"
