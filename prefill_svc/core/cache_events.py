"""What the prefix cache tells whoever follows it: hashes of pages and checkpoints that came and went.

A follower that has seen everything since a `Cleared` knows exactly what is cached. A checkpoint is named by the hash of
the page it stands behind; it is of use only while that page and all before it are there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stored:
    """These became usable."""

    pages: tuple[bytes, ...] = ()
    checkpoints: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Removed:
    """These went away."""

    pages: tuple[bytes, ...] = ()
    checkpoints: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Cleared:
    """Everything went away."""


CacheEvent = Stored | Removed | Cleared
OnEvent = Callable[[CacheEvent], None]


def unheard(event: CacheEvent) -> None:
    """Nobody follows."""
