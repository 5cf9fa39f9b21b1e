"""Asks the items of a suite over REST and judges what comes back.

An item with tools goes as prompt ids to `/v1/completions`, since the chat endpoint does not serve tools; its answer is
taken with all tags. Every other item goes to `/v1/chat/completions`; user turns before the last that have no assistant
turn behind them are answered by the model first, so that follow-up questions continue a real conversation. Suites
without a gold answer are sampled at temperature 1 with the item's number as seed, all others are greedy.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from k3.bench.scoring import is_right
from k3.bench.speculation import Acceptance
from k3.bench.suites import Item, longest_answer
from k3.errors import K3Error

Json = dict[str, Any]


class BadAnswer(K3Error):
    """The server answered something else than a completion."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request in token ids: what another engine needs to answer it again. Kept where it is asked for."""

    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    temperature: float
    seed: int
    limit: int
    ends_itself: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for one item. `error` is empty when it is complete; with an error it counts as wrong.

    is_right: None where nothing is scored. text: the response, or everything generated for check `raw`.
    Counts, times and acceptance are of all turns; `ends_itself`: the last turn ended before its limit. decode_s: from
    complete caches to the last token, as the server tells, for decode_tokens: all but each turn's first one, which
    prefill draws.
    """

    item: Item
    is_right: bool | None
    text: str
    ends_itself: bool
    prompt_tokens: int
    output_tokens: int
    total_s: float
    acceptance: Acceptance | None
    error: str
    exchanges: tuple[Exchange, ...] = ()
    decode_tokens: int = 0
    decode_s: float = 0.0


class Asker:
    """One server. Made by `open`; `model` is the name it serves, `reports_spec` whether it counts accepted drafts."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        concurrency: int,
        model: str,
        reports_spec: bool,
        keeps_ids: bool = False,
    ) -> None:
        self.model = model
        self.reports_spec = reports_spec
        self._client = client
        self._gate = asyncio.Semaphore(concurrency)
        self._keeps_ids = keeps_ids
        self._extra: Json = {"return_spec_stats": True} if reports_spec else {}
        if keeps_ids:
            self._extra["return_token_ids"] = True

    @staticmethod
    async def open(
        client: httpx.AsyncClient, concurrency: int, *, keeps_ids: bool = False
    ) -> Asker:
        """Learn the model's name, and with one token whether `return_spec_stats` is served.

        keeps_ids: answers come with their exchanges. K3Error when no ready server is there.
        """
        probe = {"prompt": "a", "max_tokens": 1, "temperature": 0, "return_spec_stats": True}
        try:
            models = await client.get("/v1/models")
            first = await client.post("/v1/completions", json=probe)
        except httpx.HTTPError as error:
            raise K3Error(
                f"{client.base_url}: {type(error).__name__}: {error}; is a k3-router there?"
            ) from error
        refuses_spec = first.status_code == 400 and "return_spec_stats" in first.text
        if first.status_code != 200 and not refuses_spec:
            raise K3Error(f"{client.base_url}: {_failure(first)}; is it a ready k3-router?")
        model = str(models.json()["data"][0]["id"])
        return Asker(client, concurrency, model, not refuses_spec, keeps_ids)

    async def suite(
        self, name: str, items: Sequence[Item], on_done: Callable[[Answer], None] = lambda _: None
    ) -> list[Answer]:
        """Answers of all items, in their order."""
        limit = longest_answer(name)

        async def one(number: int, item: Item) -> Answer:
            async with self._gate:
                answer = await self._answer(item, number, limit)
            on_done(answer)
            return answer

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(number, item)) for number, item in enumerate(items)]
        return [task.result() for task in tasks]

    async def _answer(self, item: Item, number: int, limit: int) -> Answer:
        """Ask one item; every failure becomes an answer with `error`."""
        sampling: Json = {"temperature": 0}
        if item.check == "none":
            sampling = {"temperature": 1, "seed": number}
        sampling |= self._extra
        turns = _Turns(item, self._keeps_ids)
        try:
            if item.tools is not None:
                await self._ask_raw(item, turns, sampling | {"max_tokens": limit})
            else:
                await self._ask_chat(item, turns, sampling | {"max_completion_tokens": limit})
        except httpx.HTTPError as error:
            return turns.failed(f"transport: {type(error).__name__}")
        except BadAnswer as error:
            return turns.failed(str(error))
        except (ValueError, KeyError, IndexError, TypeError) as error:
            return turns.failed(f"not a completion: {error!r}")
        return turns.finished()

    async def _ask_chat(self, item: Item, turns: _Turns, settings: Json) -> None:
        messages: list[Mapping[str, str]] = []
        for turn in item.turns:
            if messages and messages[-1]["role"] == turn["role"] == "user":
                text = await self._chat(messages, turns, settings)
                messages.append({"role": "assistant", "content": text})
            messages.append(turn)
        await self._chat(messages, turns, settings)

    async def _chat(
        self, messages: Sequence[Mapping[str, str]], turns: _Turns, settings: Json
    ) -> str:
        response = await self._post(
            "/v1/chat/completions", {"messages": list(messages), **settings}
        )
        body = response.json()
        text = str(_choice(body)["message"]["content"] or "")
        turns.add(body, text, settings, decode_seconds(response))
        return text

    async def _ask_raw(self, item: Item, turns: _Turns, settings: Json) -> None:
        rendered = await self._post(
            "/tokenize", {"messages": list(item.turns), "tools": list(item.tools or ())}
        )
        request = {
            "prompt": rendered.json()["tokens"],
            "skip_special_tokens": False,
            "include_stop_str_in_output": True,
            **settings,
        }
        response = await self._post("/v1/completions", request)
        body = response.json()
        turns.add(body, str(_choice(body)["text"]), settings, decode_seconds(response))

    async def _post(self, path: str, body: Json) -> httpx.Response:
        response = await self._client.post(path, json=body)
        if response.status_code != 200:
            raise BadAnswer(_failure(response))
        return response


class _Turns:
    """Adds up the turns of one item."""

    def __init__(self, item: Item, keeps_ids: bool) -> None:
        self._item, self._keeps_ids = item, keeps_ids
        self._exchanges: list[Exchange] = []
        self._start = time.monotonic()
        self._text = ""
        self._ends_itself = False
        self._prompt_tokens = 0
        self._output_tokens = 0
        self._decode_tokens = 0
        self._decode_s = 0.0
        self._acceptance: Acceptance | None = None

    def add(self, body: Json, text: str, settings: Json, decode_s: float) -> None:
        self._text = text
        self._ends_itself = _choice(body)["finish_reason"] != "length"
        self._prompt_tokens += body["usage"]["prompt_tokens"]
        self._output_tokens += body["usage"]["completion_tokens"]
        self._decode_tokens += max(body["usage"]["completion_tokens"] - 1, 0)
        self._decode_s += decode_s
        reported = Acceptance.of_body(body)
        if reported is not None:
            so_far = self._acceptance or Acceptance.none(len(reported.histogram) - 1)
            self._acceptance = so_far.plus(reported)
        if self._keeps_ids:
            self._exchanges.append(_exchange(body, settings, self._ends_itself))

    def finished(self) -> Answer:
        item, text = self._item, self._text
        return self._record(is_right(item.check, item.answer, response=text, raw=text), "")

    def failed(self, error: str) -> Answer:
        return self._record(None if self._item.check == "none" else False, error)

    def _record(self, right: bool | None, error: str) -> Answer:
        return Answer(
            item=self._item,
            is_right=right,
            text=self._text,
            ends_itself=self._ends_itself and not error,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            total_s=time.monotonic() - self._start,
            acceptance=self._acceptance,
            error=error,
            exchanges=tuple(self._exchanges),
            decode_tokens=self._decode_tokens,
            decode_s=self._decode_s,
        )


def _exchange(body: Json, settings: Json, ends_itself: bool) -> Exchange:
    """Prompt ids stand beside the choices of a chat, and in the choice of a completion."""
    choice = _choice(body)
    prompt = body.get("prompt_token_ids") or choice["prompt_token_ids"]
    limit = settings.get("max_tokens") or settings["max_completion_tokens"]
    return Exchange(
        tuple(prompt),
        tuple(choice["token_ids"]),
        float(settings["temperature"]),
        int(settings.get("seed", 0)),
        int(limit),
        ends_itself,
    )


def decode_seconds(response: httpx.Response) -> float:
    """The `decode` part of an answer's Server-Timing header, in seconds; 0 where a server sends none."""
    found = re.search(r"\bdecode;dur=([0-9.]+)", response.headers.get("Server-Timing", ""))
    return float(found[1]) / 1000 if found else 0.0


def _choice(body: Json) -> Json:
    return body["choices"][0]


def _failure(response: httpx.Response) -> str:
    try:
        error = response.json()["error"]
        return f"HTTP {response.status_code} {error['code']}: {error['message']}"
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status_code}: {response.text[:80]}"
