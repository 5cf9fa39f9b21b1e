"""One streaming request in a thread of its own, to be watched and abandoned by a test."""

from __future__ import annotations

import json
import threading
from types import TracebackType

import httpx


class Generation:
    """Starts at once. `tokens` grows as they arrive; after `wait` one of `status`, `error`, `is_done` tells the end."""

    def __init__(
        self,
        url: str,
        prompt: list[int],
        *,
        max_tokens: int = 16,
        timeout_s: float = 90.0,
        **more: object,
    ) -> None:
        self.status: int | None = None
        self.body = ""
        self.headers: dict[str, str] = {}
        self.tokens: list[int] = []
        self.error: dict[str, object] | None = None
        self.is_done = False
        self.is_cut = False
        self._first = threading.Event()
        self._gone = threading.Event()
        body = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        self._request = (url, body | more, timeout_s)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self) -> Generation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.leave()

    def _run(self) -> None:
        url, body, timeout_s = self._request
        try:
            with (
                httpx.Client(base_url=url, timeout=timeout_s) as client,
                client.stream("POST", "/v1/completions", json=body) as answer,
            ):
                self.status = answer.status_code
                self.headers = dict(answer.headers)
                if answer.status_code != 200:
                    self.body = answer.read().decode()
                    return
                for line in answer.iter_lines():
                    self._read(line)
                    if self._gone.is_set():
                        return
        except httpx.TransportError:
            self.is_cut = True
        finally:
            self._first.set()

    def _read(self, line: str) -> None:
        if line == "data: [DONE]":
            self.is_done = True
        elif line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                self.error = event["error"]
                return
            for choice in event["choices"]:
                self.tokens += choice.get("token_ids") or []
                if choice.get("token_ids"):
                    self._first.set()

    def wait_first(self, deadline_s: float = 30.0) -> None:
        """Until the first token (or the end)."""
        assert self._first.wait(deadline_s), f"no token within {deadline_s:g} s"

    def leave(self) -> None:
        """Go away as a client does: at the next event, or never having read one."""
        self._gone.set()

    def join(self, deadline_s: float) -> bool:
        """Wait for the end; whether it came."""
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def wait(self, deadline_s: float) -> Generation:
        """Until the request ended."""
        assert self.join(deadline_s), f"the request still hangs after {deadline_s:g} s"
        return self
