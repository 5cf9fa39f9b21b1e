"""The cluster of the tests: `k3.cluster.LocalCluster`, exactly what `k3-local` runs, with eyes.

It keeps the logs, knows the processes of fronts and ranks, reads the instances' own gauges, and holds them against
their values before the first request (`expect_baseline`). A failing test shows the last lines of every process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from prometheus_client.parser import text_string_to_metric_families

from k3.cluster import LocalCluster, Member, Options, get

T = TypeVar("T")
Gauges = Mapping[str, float]
# What must be as before once nothing runs; free and cached pages may differ by the prefix cache.
HELD = (
    "k3_prefill_running", "k3_prefill_waiting", "k3_decode_running", "k3_decode_waiting",
    "k3_helix_rank_tokens", "k3_kv_pages", "k3_state_slots", "k3_draft_slots", "k3_transfer_in_flight",
    "k3_router_requests_in_flight", "k3_router_queue_depth",
)  # fmt: skip
MAY_DIFFER = ("state=free", "state=cached", "state=vacant", "state=checkpoint")


def wait_for(condition: Callable[[], T], deadline_s: float, what: str, poll_s: float = 0.02) -> T:
    """The first true value of `condition()`; AssertionError naming `what` after `deadline_s`."""
    end = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {deadline_s:g} s: {what}"
        time.sleep(poll_s)
    return value


def metric(text: str, name: str, **labels: str) -> float | None:
    """Sum of the samples of this name that carry these labels; None when there is none."""
    found = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return sum(found) if found else None


def held(text: str) -> dict[str, float]:
    """Gauges of `HELD` in a /metrics text, as `name{label=value}`, less those that may differ."""
    out: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        if family.name in HELD:
            for sample in family.samples:
                key = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
                if not any(word in key for word in MAY_DIFFER):
                    out[f"{sample.name}{{{key}}}"] = sample.value
    return out


def children(pid: int) -> list[int]:
    """Processes that `pid` started and that still exist (a zombie does)."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        try:
            found += [int(word) for word in (task / "children").read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue
    return sorted(found)


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in ("Z", "X")


class Cluster(LocalCluster):
    """A running cluster; leave the `with` block to stop it."""

    def __init__(
        self,
        *,
        prefill_flags: tuple[str, ...] = (),
        decode_flags: tuple[str, ...] = (),
        router_flags: tuple[str, ...] = (),
        n_prefills: int = 1,
        n_decodes: int = 1,
        preset: str = "tiny-demo",
        env: Mapping[str, str] | None = None,
        start_deadline_s: float = 120.0,
    ) -> None:
        self.logs: list[tuple[str, str]] = []
        self._start_deadline_s = start_deadline_s
        self._baseline: dict[str, Gauges] = {}
        options = Options(
            n_prefills=n_prefills,
            n_decodes=n_decodes,
            router_flags=router_flags,
            prefill_flags=prefill_flags,
            decode_flags=decode_flags,
            preset=preset,
            env=tuple((env or {}).items()),
        )
        super().__init__(options, on_line=lambda name, line: self.logs.append((name, line)))

    def __enter__(self) -> Cluster:
        self.start(self._start_deadline_s)
        self._baseline = {member.name: held(self.metrics(member)) for member in self.members}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        if error is not None:
            error.add_note("\n".join(f"[{name}] {line}" for name, line in self.logs[-60:]))

    def metrics(self, member: Member) -> str:
        """Text of its /metrics; empty when it does not answer."""
        answer = get(member.ops, "/metrics", timeout_s=5.0)
        return answer.body if answer.status == 200 else ""

    def gauge(self, member: Member, name: str, **labels: str) -> float:
        """One gauge or counter of a member, summed over labels not named; 0 when it does not answer."""
        return metric(self.metrics(member), name, **labels) or 0.0

    def ranks(self, member: Member) -> list[int]:
        """Process ids of an engine's ranks."""
        return [pid for pid in children(member.pid) if is_alive(pid)]

    def is_ready(self, member: Member) -> bool:
        """Whether its /ready says 200."""
        return get(member.ops, "/ready").status == 200

    def differences(self) -> list[str]:
        """Gauges that are not as they were before the first request; empty = nothing is held."""
        out: list[str] = []
        for member in self.members:
            now = held(self.metrics(member))
            for name, value in self._baseline[member.name].items():
                if now.get(name) != value:
                    out.append(f"{member.name}: {name} is {now.get(name)}, was {value}")
        return out

    def expect_baseline(self, deadline_s: float = 15.0) -> None:
        """Every page, slot, row, pin and place in a queue is given back within the deadline."""
        end = time.monotonic() + deadline_s
        while left := self.differences():
            assert time.monotonic() < end, f"still held after {deadline_s:g} s: {left}"
            time.sleep(0.05)
