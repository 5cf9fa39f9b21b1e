"""A mover with one transfer under way, and the fates of its writes from a list."""

from __future__ import annotations

from k3.transfer.local import Fate, LocalFabric
from tests.movers import Net

LEN = 33  # 9 pages of 4 tokens, the last one with a single token
PAGES = [8, 1, 0, 3, 4, 2, 6, 7, 5]
TARGETS = [3, 4, 1, 8, 2, 0, 7, 5, 6]  # a rank reads as many as it owns
ID = 0xFEED


class Script(LocalFabric):
    """Fates from a list, then `rest` for ever."""

    def __init__(self, *fates: Fate, rest: Fate | None = None) -> None:
        super().__init__(lambda: 0.0)
        self.fates = list(fates)
        self.rest = rest or Fate()
        self.n_posted = 0
        self.fate = lambda _sender, _receiver: self._next()

    def _next(self) -> Fate:
        self.n_posted += 1
        return self.fates.pop(0) if self.fates else self.rest


def running(net: Net, transfer_id: int = ID, **copy: object) -> Net:
    """A connected net with one transfer whose pages are all asked for."""
    net.fill(LEN, PAGES, TARGETS)
    net.connect()
    net.expect(transfer_id, LEN)
    net.start(transfer_id, LEN, TARGETS)
    fields = {"first_page": 0, "pages": PAGES, "last": True, "state_slot": 2, "tokens": LEN}
    net.copy(transfer_id, **(fields | copy))
    return net
