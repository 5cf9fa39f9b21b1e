"""Orders of preference among instances, each a name of the configuration. Pure, randomness is given.

`cache_aware` sends a prompt where least is left to compute: tokens it would not find in the cache, plus tokens that
wait there already. `session` and `prefix` keep what belongs together at one instance by rendezvous hashing, so that an
instance that comes or goes moves only its own share.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence

from router.fleet.pairing import InstanceView, Need, PairingRules, Policy

MANY_INSTANCES = 8  # above this, least load compares two random ones, so that routers do not herd
PREFIX_TOKENS = 64  # what `prefix` takes for a prompt's beginning


class LeastLoadedDecode:
    """Share of pages used plus share of rows used; two random choices when there are many."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def order(self, views: Sequence[InstanceView], need: Need) -> list[InstanceView]:
        """Least loaded first."""
        if len(views) > MANY_INSTANCES:
            return _best_of_two(views, self._score, self._rng)
        return sorted(views, key=self._score)

    @staticmethod
    def _score(view: InstanceView) -> tuple[float, int, str]:
        used = (view.pages_total - view.pages_free) / max(view.pages_total, 1)
        rows = _n_requests(view) / max(view.max_rows, 1)
        return used + rows, view.in_flight, view.instance_id


class LeastLoadedPrefill:
    """Fewest prompt tokens waiting, then fewest requests of this router."""

    def order(self, views: Sequence[InstanceView], need: Need) -> list[InstanceView]:
        """Least loaded first."""
        return sorted(views, key=_waiting)


class CacheAware:
    """Fewest tokens until the prompt is computed: not in the cache there, or waiting before it."""

    def order(self, views: Sequence[InstanceView], need: Need) -> list[InstanceView]:
        """Cheapest first."""
        return sorted(
            views,
            key=lambda view: (_tokens_left(view, need), view.in_flight, view.instance_id),
        )


class CacheAwareDecode:
    """The same among instances that compute their own prompts, times the requests that wait through it.

    While a prompt is computed the others there wait too: those tokens are delay for each of them. `other` decides
    between equals.
    """

    def __init__(self, other: Policy) -> None:
        self._other = other

    def order(self, views: Sequence[InstanceView], need: Need) -> list[InstanceView]:
        """Cheapest first."""
        return sorted(
            self._other.order(views, need),
            key=lambda view: _tokens_left(view, need) * (1 + _n_requests(view)),
        )


class PowerOfTwo:
    """The less loaded of two random ones."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def order(self, views: Sequence[InstanceView], need: Need) -> list[InstanceView]:
        """The winner first, the others in any order."""
        return _best_of_two(views, _waiting, self._rng)


class Random:
    """Any."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def order(self, views: Sequence[InstanceView], need: Need) -> list[InstanceView]:
        """A random order."""
        return self._rng.sample(list(views), len(views))


class RoundRobin:
    """Each in turn, in the order of their ids."""

    def __init__(self) -> None:
        self._last = ""

    def order(self, views: Sequence[InstanceView], need: Need) -> list[InstanceView]:
        """The one after the last chosen first."""
        by_id = sorted(views, key=lambda view: view.instance_id)
        start = next((i for i, view in enumerate(by_id) if view.instance_id > self._last), 0)
        order = by_id[start:] + by_id[:start]
        self._last = order[0].instance_id
        return order


class Rendezvous:
    """What `key` names always meets the same instance while it lives; requests it names nothing of go by `other`."""

    def __init__(self, key: Callable[[Need], bytes], other: Policy) -> None:
        self._key = key
        self._other = other

    def order(self, views: Sequence[InstanceView], need: Need) -> list[InstanceView]:
        """By the weight that key and instance have together."""
        key = self._key(need)
        if not key:
            return self._other.order(views, need)

        def weight(view: InstanceView) -> bytes:
            return hashlib.blake2b(view.instance_id.encode(), key=key, digest_size=8).digest()

        return sorted(views, key=weight, reverse=True)


def session_key(need: Need) -> bytes:
    """Names the session a client gave; empty without one."""
    return _key(need.session.encode()) if need.session else b""


def prefix_key(need: Need) -> bytes:
    """Names the first PREFIX_TOKENS tokens; empty for shorter prompts."""
    if need.pages is None or need.prompt_len < PREFIX_TOKENS:
        return b""
    return _key(repr(tuple(need.pages.token_ids[:PREFIX_TOKENS])).encode())


def decode_policies(rng: random.Random) -> Mapping[str, Policy]:
    """By name."""
    base = LeastLoadedDecode(rng)
    return {
        "least_load": base,
        "round_robin": RoundRobin(),
        "random": Random(rng),
        "session": Rendezvous(session_key, base),
        "prefix": Rendezvous(prefix_key, base),
        "cache_aware": CacheAwareDecode(base),
    }


def prefill_policies(rng: random.Random) -> Mapping[str, Policy]:
    """By name."""
    base = CacheAware()
    return {
        "cache_aware": base,
        "least_load": LeastLoadedPrefill(),
        "round_robin": RoundRobin(),
        "random": Random(rng),
        "power_of_two": PowerOfTwo(rng),
        "session": Rendezvous(session_key, base),
        "prefix": Rendezvous(prefix_key, base),
    }


def make_rules(
    decode_policy: str, prefill_policy: str, max_retries: int, rng: random.Random
) -> PairingRules:
    """Rules from the names of the configuration, which has checked them."""
    decode = decode_policies(rng)[decode_policy]
    return PairingRules(decode, prefill_policies(rng)[prefill_policy], 1 + max_retries)


def _tokens_left(view: InstanceView, need: Need) -> int:
    return max(need.prompt_len - view.usable_tokens, 0) + view.waiting_tokens


def _n_requests(view: InstanceView) -> int:
    return max(view.running, view.in_flight)


def _waiting(view: InstanceView) -> tuple[int, int, str]:
    return view.waiting_tokens, view.in_flight, view.instance_id


def _best_of_two(
    views: Sequence[InstanceView],
    score: Callable[[InstanceView], tuple[float, int, str]],
    rng: random.Random,
) -> list[InstanceView]:
    best = min(rng.sample(list(views), min(2, len(views))), key=score)
    return [best, *(view for view in views if view is not best)]


def _key(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=32).digest()
