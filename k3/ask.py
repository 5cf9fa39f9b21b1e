"""One chat question over the public API, streamed; what `k3-local --ask`, `make demo` and `helm test` show.

Standard library only, so that it needs no extra. The load generator lives in `k3/bench/`.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from k3.config.api_keys import read_keys
from k3.errors import K3Error


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back. Times in seconds since the request was sent.

    tokens_per_step: mean of the steps that checked drafts; None where the server does not speculate.
    """

    text: str
    reasoning: str
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str
    ttft_s: float
    total_s: float
    tokens_per_step: float | None = None

    @property
    def itl_s(self) -> float:
        """Mean time between two tokens."""
        return (self.total_s - self.ttft_s) / max(1, self.completion_tokens - 1)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens over the whole time."""
        return self.completion_tokens / self.total_s


def ask(
    url: str,
    question: str,
    on_text: Callable[[str, bool], None],
    *,
    max_tokens: int = 300,
    timeout_s: float = 120.0,
    api_key: str = "",
) -> Answer:
    """Stream one greedy answer. `on_text(piece, is_reasoning)` sees each piece as it comes. api_key: "" sends none.

    K3Error when the answer is an error, before or within the stream.
    """
    body = {
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_completion_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_spec_stats": True,
    }
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=timeout_s)
    try:
        started = time.monotonic()
        headers = {"Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {api_key}"} if api_key else {}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise K3Error(f"HTTP {response.status}: {response.read().decode()}")
        return _read(response, started, on_text)
    finally:
        connection.close()


def _read(
    response: http.client.HTTPResponse, started: float, on_text: Callable[[str, bool], None]
) -> Answer:
    text: list[str] = []
    reasoning: list[str] = []
    finish, first = "", 0.0
    usage: dict[str, Any] = {}
    metrics: dict[str, Any] = {}
    for raw in response:
        line = raw.decode().strip()
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event: dict[str, Any] = json.loads(line[6:])
        if "error" in event:
            raise K3Error(f"the stream ended with an error: {event['error']}")
        usage = event.get("usage") or usage
        metrics = event.get("metrics") or metrics
        for choice in event["choices"]:
            finish = choice.get("finish_reason") or finish
            for key, kept in (("reasoning_content", reasoning), ("content", text)):
                piece = choice["delta"].get(key)
                if piece:
                    first = first or time.monotonic() - started
                    kept.append(piece)
                    on_text(piece, key == "reasoning_content")
    return Answer(
        text="".join(text),
        reasoning="".join(reasoning),
        prompt_tokens=usage.get("prompt_tokens", 0),
        completion_tokens=usage.get("completion_tokens", 0),
        finish_reason=finish,
        ttft_s=first,
        total_s=time.monotonic() - started,
        tokens_per_step=_tokens_per_step(metrics),
    )


def _tokens_per_step(metrics: dict[str, Any]) -> float | None:
    speculation: dict[str, Any] | None = metrics.get("speculative_decoding")
    if speculation is None or not speculation["num_spec_steps"]:
        return None
    return float(speculation["mean_acceptance_length"])


def main() -> None:
    """`python -m k3.ask --url URL QUESTION`: print the answer as it comes; exit 1 when there is none."""
    p = argparse.ArgumentParser(prog="python -m k3.ask", description=main.__doc__)
    p.add_argument("question")
    p.add_argument("--url", default="http://127.0.0.1:8000", help="the router")
    p.add_argument("--max-tokens", type=int, default=300)
    p.add_argument("--timeout-s", type=float, default=120.0, help="of one read")
    p.add_argument("--api-key-file", default="", help="keys, one a line; the first one is sent")
    args = p.parse_args()

    def show(piece: str, is_reasoning: bool) -> None:
        sys.stdout.write(piece)
        sys.stdout.flush()

    try:
        answer = ask(
            args.url,
            args.question,
            show,
            max_tokens=args.max_tokens,
            timeout_s=args.timeout_s,
            api_key=next(iter(read_keys(args.api_key_file)), ""),
        )
    except (K3Error, OSError, ValueError) as error:
        sys.stderr.write(f"{args.url}: {error}\n")
        sys.exit(1)
    sys.stdout.write("\n")
    sys.exit(0 if answer.completion_tokens > 0 else 1)


if __name__ == "__main__":
    main()
