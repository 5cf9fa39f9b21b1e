"""Steps recorded once per key as CUDA graphs and replayed: a step then costs the host one launch.

Steps are rounded up to few sizes (rows, length, group width, parts of drawing), so that few graphs serve all. Those of
the service's ordinary steps are recorded before the first request; any other at its first use, which takes as long as
a few eager steps. All graphs share the memory of what a step holds in between: the largest one sets it. No more than
`most` are kept, and the one unused for longest goes first: counted, not weighed, because the ranks of a group record
the same steps together and must agree about it.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from decode_svc.rank.graphs import (
    UNCHECKED,
    Buffers,
    Eager,
    FixedBuffers,
    GraphRunner,
    StepKey,
    Work,
    generous,
    smallest,
)
from k3.config import speculation
from k3.config.tree import EngineConfig
from k3.device import Device, Graph
from k3.errors import ConfigError
from k3.rank.context import RankContext
from k3.sampling import Flavour

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]

SHORTEST, FACTOR = 512, 4  # length bounds: 512, 2048, 8192 .. tokens


@dataclass(frozen=True, slots=True)
class Sizes:
    """What steps are rounded up to, each ascending and ending with the largest there is."""

    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    groups: tuple[int, ...]

    @classmethod
    def up_to(cls, rows: int, length: int, group: int) -> Sizes:
        """Rows and groups in powers of two, lengths in powers of four."""
        return cls(_powers(1, 2, rows), _powers(SHORTEST, FACTOR, length), _powers(1, 2, group))


def _powers(first: int, factor: int, last: int) -> tuple[int, ...]:
    found: list[int] = []
    while first < last:
        found.append(first)
        first *= factor
    return (*found, last)


GREEDY = Flavour(greedy=True)
DRAWN = Flavour(sampled=True)
FILTERED = Flavour(sampled=True, top_p=True)


def ordinary(sizes: Sizes, config: EngineConfig) -> tuple[StepKey, ...]:
    """Steps that every service of this configuration comes to, the largest first: no edits, no log probabilities."""
    widest, drafting = sizes.groups[-1], config.spec.draft_tokens > 0
    kinds = [(widest, True)]
    if drafting:
        kinds.append((UNCHECKED, True))
    if drafting and config.spec.gate_window:
        kinds.append((1, False))
    if speculation.is_by_confidence(config):
        kinds += [(group, True) for group in reversed(sizes.groups[:-1])]
    return tuple(
        StepKey(rows, length, generous(flavour), group, proposes)
        for group, proposes in kinds
        for length in reversed(sizes.lengths)
        for rows in reversed(sizes.rows)
        for flavour in (GREEDY, DRAWN, FILTERED)
        if group != UNCHECKED or flavour == GREEDY or config.spec.acceptance != "match"
    )


def open_runner(context: RankContext) -> GraphRunner:
    """How the configuration says steps are launched. Raises ConfigError where they cannot be recorded."""
    config, ops, group = context.config, context.stage.ops, 1 + context.config.spec.draft_tokens
    if config.backends.graphs != "on":
        return Eager()
    if not (context.device.can_capture and ops.capturable):
        raise ConfigError(
            f"backends.graphs=on: steps on {context.device.torch_device} with {ops.chosen} cannot be recorded; set the "
            "backends to auto on a GPU, or backends.graphs=off to run steps as they come"
        )
    longest = config.model.max_model_len or context.spec.max_position_embeddings
    sizes = Sizes.up_to(config.schedule.max_rows, longest + group, group)
    return CudaGraphs(context.device, sizes, config.backends.max_graphs)


class CudaGraphs:
    """`GraphRunner` over a device that can capture."""

    def __init__(self, device: Device, sizes: Sizes, most: int) -> None:
        """most: graphs kept at a time."""
        self.sizes = sizes
        self._device, self._most = device, most
        self._graphs: OrderedDict[StepKey, Graph] = OrderedDict()
        self._fixed = FixedBuffers()
        self.n_recorded = 0  # ever
        self.n_bytes = 0  # device memory that recording took and did not give back

    def bucket(self, n_rows: int) -> int:
        """The smallest size that holds `n_rows`."""
        return smallest(self.sizes.rows, n_rows)

    def bound(self, max_len: int) -> int:
        """The smallest size that holds `max_len`."""
        return smallest(self.sizes.lengths, max_len)

    def width(self, group: int) -> int:
        """The smallest size that holds `group`."""
        return smallest(self.sizes.groups, group)

    def flavour(self, flavour: Flavour) -> Flavour:
        """One of few."""
        return generous(flavour)

    def is_ready(self, key: StepKey) -> bool:
        """Whether there is a graph of this key."""
        return key in self._graphs

    def capture(self, key: StepKey, work: Work, buffers: Buffers) -> None:
        """Record, and drop the graph unused for longest where there are too many. Raises K3Error."""
        started, before = time.perf_counter(), self._device.free_bytes()
        self._fixed.keep(buffers)
        if len(self._graphs) >= self._most:
            self._device.synchronize()  # it may be running
            self._graphs.popitem(last=False)
        self._graphs[key] = self._device.capture(work)
        after = self._device.free_bytes()
        if before is not None and after is not None:
            self.n_bytes += before - after
        self.n_recorded += 1
        log.debug("recorded %s in %.2f s", key, time.perf_counter() - started)

    def record(
        self, config: EngineConfig, prepare: Callable[[StepKey], object], report: Progress
    ) -> None:
        """Record the ordinary steps of a service. prepare: has this runner capture one. report: (done, all of them)."""
        started, keys = time.perf_counter(), ordinary(self.sizes, config)
        for done, key in enumerate(keys, start=1):
            prepare(key)
            report(done, len(keys))
        log.info(
            "%d steps recorded in %.1f s, %.0f MiB of device memory",
            self.n_recorded,
            time.perf_counter() - started,
            self.n_bytes / 2**20,
        )

    def run(self, key: StepKey, work: Work) -> None:
        """Replay the graph of a key that is ready."""
        self._graphs.move_to_end(key)
        self._graphs[key].replay()
