"""Tokens handed out in the making of one plan. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from prefill_svc.core.request import PrefillRequest


@dataclass(slots=True)
class Budget:
    """left: tokens nobody has. align: chunks that do not end a prompt are multiples of it.

    cut(request, n): tokens the next chunk really has when it may have n.
    """

    left: int
    align: int
    cut: Callable[[PrefillRequest, int], int]
    granted: dict[int, int] = field(default_factory=dict[int, int])

    def give(self, request: PrefillRequest, limit: int) -> None:
        """Raise the request's grant by at most `limit`."""
        before = self.granted.get(request.key, 0)
        total = min(request.remaining, before + min(limit, self.left))
        if total < request.remaining:
            total -= total % self.align
        total = self.cut(request, total)
        if total > before:
            self.granted[request.key] = total
            self.left -= total - before
