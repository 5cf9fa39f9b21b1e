"""What a prompt would find in the prefix caches of instances, as far as the router can know.

Exactly, from the events of an instance (`CacheView`): pages count up to the deepest state checkpoint among them.
Roughly, from the prompts this router sent there (`RoutedPrompts`), when the events of an instance stopped coming.
Hashes are those of `k3/cache/hash_chain.py`. Pure: time is an argument.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from k3.cache import hash_chain

STALE_S = 5.0  # an instance is heard at least every two seconds
ROUTED_TTL_S = 600.0
MAX_ROUTED_PAGES = 1 << 16


class PromptPages:
    """A prompt's chains of page hashes, computed once for each kind of cache."""

    def __init__(self, token_ids: Sequence[int], salt: bytes) -> None:
        self.token_ids = token_ids
        self._salt = salt
        self._chains: dict[tuple[str, int], tuple[bytes, ...]] = {}

    def chain(self, namespace: str, page_tokens: int) -> tuple[bytes, ...]:
        """Hash of every whole page."""
        key = (namespace, page_tokens)
        chain = self._chains.get(key)
        if chain is None:
            parent = hash_chain.root(namespace, page_tokens, salt=self._salt)
            chain = hash_chain.page_hashes(parent, self.token_ids, page_tokens)
            self._chains[key] = chain
        return chain


class CacheView:
    """One instance's cache as its events tell it.

    is_there: whether it was ever heard to have one. is_whole: false while a snapshot is outstanding.
    """

    def __init__(self) -> None:
        self.is_there = False
        self.is_whole = True
        self._pages: set[bytes] = set()
        self._checkpoints: set[bytes] = set()

    @property
    def n_pages(self) -> int:
        """Pages known."""
        return len(self._pages)

    def stored(self, pages: Sequence[bytes], checkpoints: Sequence[bytes]) -> None:
        """These became usable."""
        self._pages.update(pages)
        self._checkpoints.update(checkpoints)

    def removed(self, pages: Sequence[bytes], checkpoints: Sequence[bytes]) -> None:
        """These went away."""
        self._pages.difference_update(pages)
        self._checkpoints.difference_update(checkpoints)

    def lose(self) -> None:
        """What is there is not known any more, until a whole snapshot says."""
        self.is_whole = False
        self.clear()

    def clear(self) -> None:
        """Everything went away."""
        self._pages.clear()
        self._checkpoints.clear()

    def usable_pages(self, chain: Sequence[bytes]) -> int:
        """Pages a prompt could skip: up to the deepest checkpoint of those cached in one piece from the front."""
        found = _depth(chain, self._pages.__contains__)
        return next((n for n in range(found, 0, -1) if chain[n - 1] in self._checkpoints), 0)


class RoutedPrompts:
    """Pages of prompts that were sent to one instance lately; at most MAX_ROUTED_PAGES, the oldest go first."""

    def __init__(self, limit: int = MAX_ROUTED_PAGES) -> None:
        self._limit = limit
        self._sent: OrderedDict[bytes, float] = OrderedDict()

    def sent(self, chain: Sequence[bytes], now: float) -> None:
        """A prompt goes there."""
        for page in reversed(chain):  # the front of a chain is of use longest
            self._sent[page] = now
            self._sent.move_to_end(page)
        while len(self._sent) > self._limit:
            self._sent.popitem(last=False)

    def usable_pages(self, chain: Sequence[bytes], now: float) -> int:
        """Pages of the prompt that were sent there in one piece within ROUTED_TTL_S."""
        return _depth(chain, lambda page: now - self._sent.get(page, -ROUTED_TTL_S) < ROUTED_TTL_S)


def _depth(chain: Sequence[bytes], is_known: Callable[[bytes], bool]) -> int:
    return next((n for n, page in enumerate(chain) if not is_known(page)), len(chain))
