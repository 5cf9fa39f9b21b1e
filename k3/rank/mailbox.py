"""`Mailbox`: a bounded queue whose readers and writers are released by a failure."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Items in order for one reader. Once failed, every call raises the failure, whatever is left inside."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._items: deque[T] = deque()
        self._failure: Exception | None = None
        self._changed = asyncio.Event()

    async def put(self, item: T) -> None:
        """Add an item; waits while `bound` items are inside."""
        while self._failure is None and len(self._items) >= self._bound:
            await self._change()
        if self._failure is not None:
            raise self._failure
        self._items.append(item)
        self._changed.set()

    async def get(self) -> T:
        """Take the oldest item; waits for one."""
        while self._failure is None and not self._items:
            await self._change()
        if self._failure is not None:
            raise self._failure
        self._changed.set()
        return self._items.popleft()

    def fail(self, error: Exception) -> None:
        """Release everybody; the first failure counts."""
        if self._failure is None:
            self._failure = error
            self._changed.set()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()
