"""How a step's forward is launched, per row bucket.

`GraphRunner.bucket(n)` says how many rows a step of n rows is padded to; `run(bucket, fn)` runs `fn`, whose inputs
never move, so that a runner may record it once and replay it. `Eager` records nothing: the CPU's runner, over the same
buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class GraphRunner(Protocol):
    """One implementation per device kind."""

    def bucket(self, n_rows: int) -> int:
        """Rows a step of `n_rows` runs with, at least `n_rows`."""
        ...

    def run(self, bucket: int, fn: Callable[[], T]) -> T:
        """Run `fn` for a bucket and return what it returns."""
        ...


class Eager:
    """Runs everything as it comes.

    buckets: ascending sizes steps are padded to; empty means no padding.
    """

    def __init__(self, buckets: tuple[int, ...] = ()) -> None:
        self._buckets = buckets

    def bucket(self, n_rows: int) -> int:
        """The smallest bucket that holds `n_rows`."""
        return next((b for b in self._buckets if b >= n_rows), n_rows)

    def run(self, bucket: int, fn: Callable[[], T]) -> T:
        """Call it."""
        return fn()
