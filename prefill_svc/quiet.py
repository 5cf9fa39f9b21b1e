"""Which transfers may still write: the proofs of quiet that ranks owe, and the transfers that are over.

A transfer that ended is `draining` until every rank has said that nothing it posted is left; then it is `over` for
one lease, so that a destination still under way in a dead stream cannot revive it. Bounded; time is an argument.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

MAX_OVER = 65536


@dataclass(slots=True)
class QuietBook:
    """Transfers that ended, by id. lease_s: how long one that is over is remembered."""

    lease_s: float
    _owed: dict[int, set[int]] = field(default_factory=dict[int, set[int]])
    _over: OrderedDict[int, float] = field(default_factory=OrderedDict[int, float])

    def owe(self, transfer_id: int, ranks: Iterable[int]) -> None:
        """The transfer has ended; each of these ranks owes the proof."""
        self._owed[transfer_id] = set(ranks)

    def prove(self, transfer_id: int, rank: int, now: float) -> bool:
        """A rank is quiet; returns whether that was the last proof. Proofs nobody waits for mean nothing."""
        ranks = self._owed.get(transfer_id)
        if ranks is None:
            return False
        ranks.discard(rank)
        if ranks:
            return False
        del self._owed[transfer_id]
        self.bury(transfer_id, now)
        return True

    def bury(self, transfer_id: int, now: float) -> None:
        """The transfer is over: remember it for one lease from now."""
        self._over[transfer_id] = now + self.lease_s
        self._over.move_to_end(transfer_id)
        if len(self._over) > MAX_OVER:
            self._over.popitem(last=False)

    def owing(self, transfer_id: int) -> list[int]:
        """Ranks whose proof is missing."""
        return sorted(self._owed.get(transfer_id, ()))

    def is_draining(self, transfer_id: int) -> bool:
        """Whether a proof is missing."""
        return transfer_id in self._owed

    def is_over(self, transfer_id: int) -> bool:
        """Whether the transfer ended quiet within the last lease."""
        return transfer_id in self._over

    def draining(self) -> tuple[int, ...]:
        """All transfers with a missing proof."""
        return tuple(self._owed)

    def expire(self, now: float) -> None:
        """Forget what is over for more than one lease."""
        while self._over and next(iter(self._over.values())) <= now:
            self._over.popitem(last=False)

    def forget_proofs(self) -> None:
        """The ranks are gone, and with them whatever they had posted."""
        self._owed.clear()
