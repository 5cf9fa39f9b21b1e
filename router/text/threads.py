"""Rendering and tokenizing beside the event loop: a few threads, and a bound on how many wait for one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from k3.errors import QueueFull

T = TypeVar("T")
N_THREADS = 2


class TextThreads:
    """One per router. most: pieces of work that may be open at once."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.n_open = 0
        self._pool = ThreadPoolExecutor(N_THREADS, thread_name_prefix="text")

    async def run(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises. Raises QueueFull at once when too much is open."""
        if self.n_open >= self._most:
            raise QueueFull(f"{self.n_open} prompts wait to be tokenized; try again later")
        self.n_open += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self.n_open -= 1

    def close(self) -> None:
        """Take nothing new; what runs ends by itself."""
        self._pool.shutdown(wait=False)
