"""The load generator: open loop (Poisson arrivals) or closed loop (N callers), over the public API.

Every request is streamed with `continuous_usage_stats`, so each event says how many tokens exist by then; a step that
brings several tokens counts as that many. Times are seconds on this process's monotonic clock.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from k3.bench.prompts import Call, Workload


@dataclass(frozen=True, slots=True)
class Record:
    """One request as its caller saw it; `error` is empty when the answer is complete."""

    started_s: float
    ttft_s: float
    total_s: float
    prompt_tokens: int
    output_tokens: int
    gaps_s: tuple[
        float, ...
    ]  # time per token between events, one entry a token after the first event
    finish_reason: str
    error: str

    @property
    def tpot_s(self) -> float:
        """Mean time per output token after the first."""
        return (self.total_s - self.ttft_s) / max(1, self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """rate_per_s > 0: open loop at that rate; else closed loop. At most `concurrency` are in flight either way."""

    n_requests: int
    concurrency: int
    rate_per_s: float
    seed: int

    def offsets(self) -> Iterator[float]:
        """When each request may start, seconds after the beginning."""
        rng, at = random.Random(f"{self.seed}/arrivals"), 0.0
        for _ in range(self.n_requests):
            yield at
            at += rng.expovariate(self.rate_per_s) if self.rate_per_s > 0 else 0.0


async def drive(
    url: str,
    workload: Workload,
    arrivals: Arrivals,
    *,
    timeout_s: float,
    api_key: str = "",
    on_done: Callable[[Record], None] = lambda _: None,
) -> list[Record]:
    """Send all requests and return their records in order of sending."""
    limits = httpx.Limits(max_connections=arrivals.concurrency)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    gate = asyncio.Semaphore(arrivals.concurrency)
    begin = time.monotonic()

    async def one(client: httpx.AsyncClient, call: Call) -> Record:
        try:
            record = await send(client, call, begin)
        finally:
            gate.release()
        on_done(record)
        return record

    async with httpx.AsyncClient(
        base_url=url, timeout=timeout_s, limits=limits, headers=headers, trust_env=False
    ) as client:
        async with asyncio.TaskGroup() as group:
            tasks: list[asyncio.Task[Record]] = []
            for i, offset in enumerate(arrivals.offsets()):
                await asyncio.sleep(begin + offset - time.monotonic())
                await gate.acquire()
                tasks.append(group.create_task(one(client, workload.call(i))))
    return [t.result() for t in tasks]


async def send(client: httpx.AsyncClient, call: Call, begin: float) -> Record:
    """One streamed request; every failure becomes a record with `error`."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = call.body | {"stream": True, "stream_options": options}
    watch = _Watch(begin)
    try:
        async with client.stream("POST", call.path, json=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                return watch.record(f"HTTP {response.status_code}: {_code(text)}")
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    return watch.record("")
                if line.startswith("data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        return watch.record(f"stream: {event['error'].get('code')}")
                    watch.see(event)
        return watch.record("stream: ended without [DONE]")
    except httpx.HTTPError as error:
        return watch.record(f"transport: {type(error).__name__}")


def _code(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return text[:80]


class _Watch:
    """Collects the times of one request while its events come in."""

    def __init__(self, begin: float) -> None:
        self._begin = begin
        self._start = self._last = time.monotonic()
        self._ttft = 0.0
        self._tokens = 0
        self._prompt = 0
        self._gaps: list[float] = []
        self._finish = ""

    def see(self, event: dict[str, Any]) -> None:
        now = time.monotonic()
        for choice in event["choices"]:
            self._finish = choice.get("finish_reason") or self._finish
        usage = event.get("usage")
        if not usage:
            return
        self._prompt = usage["prompt_tokens"]
        n_new = usage["completion_tokens"] - self._tokens
        if n_new <= 0:
            return
        if self._tokens == 0:
            self._ttft = now - self._start
        else:
            self._gaps += [(now - self._last) / n_new] * n_new
        self._tokens += n_new
        self._last = now

    def record(self, error: str) -> Record:
        # The last event with tokens ends the request: what follows it is bookkeeping.
        total = (self._last if self._tokens else time.monotonic()) - self._start
        return Record(
            started_s=self._start - self._begin,
            ttft_s=self._ttft,
            total_s=total,
            prompt_tokens=self._prompt,
            output_tokens=self._tokens,
            gaps_s=tuple(self._gaps),
            finish_reason=self._finish,
            error=error,
        )
