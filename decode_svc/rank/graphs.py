"""How a step is launched: as it comes, or recorded once per key and replayed.

A step's work is a function without arguments or result: everything it reads and writes lies in buffers that never move.
Whatever else it depends on (padded rows, length bound, what its rows ask of sampling) is its key, so that a recording
is good for every later step of the same key. `Eager` records nothing. `PassThrough` follows the rules of a recording
runner without having a recorder: what runs the CPU's tests of graph safety.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from torch import Tensor

from k3.sampling import Flavour

Work = Callable[[], None]
Buffers = Callable[[], Mapping[str, Tensor]]  # as they are now, by name
UNCHECKED = 0  # tokens of the group of a step that only proposes drafts, for rows that were opened
SHORTEST = 64  # tokens; the smallest length bound of a recording


class StepKey(NamedTuple):
    """All of a step that is no content of a buffer.

    max_len: bound of every row's length after the group. group: its tokens, padding included, or UNCHECKED. proposes:
    whether drafts follow.
    """

    n_rows: int
    max_len: int
    flavour: Flavour
    group: int
    proposes: bool


class GraphRunner(Protocol):
    """One implementation per device kind."""

    def bucket(self, n_rows: int) -> int:
        """Rows a step of `n_rows` runs with, at least `n_rows`."""
        ...

    def bound(self, max_len: int) -> int:
        """Length a step of at most `max_len` tokens per row is prepared for, at least `max_len`."""
        ...

    def width(self, group: int) -> int:
        """Tokens per row a step of groups of `group` runs with, at least `group`."""
        ...

    def flavour(self, flavour: Flavour) -> Flavour:
        """What a step's drawing is prepared for: every part of `flavour`, maybe more."""
        ...

    def is_ready(self, key: StepKey) -> bool:
        """Whether `run` may be called for this key; if not, `capture` comes first."""
        ...

    def capture(self, key: StepKey, work: Work, buffers: Buffers) -> None:
        """Record `work`, which touches `buffers` and nothing else that outlives it. Runs it at least once."""
        ...

    def run(self, key: StepKey, work: Work) -> None:
        """Do the work of a key that is ready; a recorder replays what it recorded for the key."""
        ...


def smallest(buckets: tuple[int, ...], n_rows: int) -> int:
    """The smallest bucket that holds `n_rows`; `n_rows` itself where none does."""
    return next((b for b in buckets if b >= n_rows), n_rows)


def doubled(max_len: int) -> int:
    """The smallest power of two that is at least `max_len` and `SHORTEST`."""
    return max(SHORTEST, 1 << (max_len - 1).bit_length())


def generous(flavour: Flavour) -> Flavour:
    """The flavour whose recording serves this one too: all filters where there is one, all edits likewise."""
    filters = flavour.top_k or flavour.top_p or flavour.min_p
    edits = flavour.bias or flavour.ban or flavour.counts
    logprobs = flavour.logprobs or flavour.top_logprobs
    return Flavour(
        greedy=True,
        sampled=flavour.sampled,
        top_k=filters,
        top_p=filters,
        min_p=filters,
        bias=edits,
        ban=edits,
        counts=edits,
        masks=flavour.masks,
        logprobs=logprobs,
        top_logprobs=logprobs,
    )


class Eager:
    """Runs everything as it comes.

    buckets: ascending sizes steps are padded to; empty means no padding.
    """

    def __init__(self, buckets: tuple[int, ...] = ()) -> None:
        self._buckets = buckets

    def bucket(self, n_rows: int) -> int:
        """The smallest bucket that holds `n_rows`."""
        return smallest(self._buckets, n_rows)

    def bound(self, max_len: int) -> int:
        """No more than needed."""
        return max_len

    def width(self, group: int) -> int:
        """No wider than asked."""
        return group

    def flavour(self, flavour: Flavour) -> Flavour:
        """No more than asked."""
        return flavour

    def is_ready(self, key: StepKey) -> bool:
        """Always."""
        return True

    def capture(self, key: StepKey, work: Work, buffers: Buffers) -> None:
        """Nothing to record."""

    def run(self, key: StepKey, work: Work) -> None:
        """Call it."""
        work()


class PassThrough:
    """A recorder's contract on any device: runs the work it was given at capture again, over buffers that may not move.

    What a step was called with later reaches the result through buffers alone, as under a recording.
    """

    def __init__(self, buckets: tuple[int, ...] = (), groups: tuple[int, ...] = ()) -> None:
        """buckets, groups: ascending sizes that rows and group widths are padded to; empty means no padding."""
        self._buckets, self._groups = buckets, groups
        self._work: dict[StepKey, Work] = {}
        self._fixed = FixedBuffers()

    @property
    def n_recorded(self) -> int:
        """Keys captured so far."""
        return len(self._work)

    def bucket(self, n_rows: int) -> int:
        """The smallest bucket that holds `n_rows`."""
        return smallest(self._buckets, n_rows)

    def bound(self, max_len: int) -> int:
        """One of few lengths, so that recordings are few."""
        return doubled(max_len)

    def width(self, group: int) -> int:
        """A power of two where the groups are as wide as that."""
        return smallest(self._groups, group)

    def flavour(self, flavour: Flavour) -> Flavour:
        """One of few."""
        return generous(flavour)

    def is_ready(self, key: StepKey) -> bool:
        """Whether the key was captured."""
        return key in self._work

    def capture(self, key: StepKey, work: Work, buffers: Buffers) -> None:
        """Keep the work and where its buffers lie; run it as often as a recorder warms up."""
        self._fixed.keep(buffers)
        self._work[key] = work
        for _ in range(2):
            self.run(key, work)

    def run(self, key: StepKey, work: Work) -> None:
        """Run what was captured. Raises AssertionError when a buffer was replaced instead of overwritten."""
        self._work[key]()
        self._fixed.check()


class FixedBuffers:
    """Where the buffers of recordings lie: a recording is worth nothing once one of them has moved."""

    def __init__(self) -> None:
        self._addresses: dict[str, int] = {}
        self._buffers: Buffers = dict

    def keep(self, buffers: Buffers) -> None:
        """Those of one more recording. Raises AssertionError unless they lie where the earlier ones did."""
        addresses = _addresses(buffers())
        if self._addresses and addresses != self._addresses:
            raise AssertionError(
                f"buffers of an earlier capture moved: {_moved(self._addresses, addresses)}"
            )
        self._addresses, self._buffers = addresses, buffers

    def check(self) -> None:
        """Raise AssertionError when one moved since."""
        addresses = _addresses(self._buffers())
        if addresses != self._addresses:
            raise AssertionError(f"buffers moved: {_moved(self._addresses, addresses)}")


def _addresses(buffers: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: buffer.data_ptr() for name, buffer in buffers.items()}


def _moved(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    return ", ".join(
        sorted(n for n in before.keys() | after.keys() if before.get(n) != after.get(n))
    )
