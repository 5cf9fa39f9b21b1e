"""Declaring metrics and writing them out: `Declare` makes them on a registry, `encode` is the body of /metrics.

Label sets whose values are known are created at once, so that a series exists at 0 before traffic.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    exposition,
)
from prometheus_client.openmetrics import exposition as openmetrics

OPENMETRICS = "application/openmetrics-text"
M = TypeVar("M", Counter, Gauge, Histogram)


@dataclass(frozen=True, slots=True)
class Declared:
    """One row of the documentation."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str


class Declare:
    """Makes metrics on one registry and remembers what was made."""

    def __init__(self, registry: CollectorRegistry) -> None:
        disable_created_metrics()  # `_created` series double the size of every scrape
        self._registry = registry
        self.rows: list[Declared] = []

    def counter(self, name: str, help: str, **labels: Sequence[str]) -> Counter:
        """A counter; `labels` maps each label to its known values (empty: made when first used)."""
        return self._add(Counter, name, help, labels)

    def gauge(self, name: str, help: str, **labels: Sequence[str]) -> Gauge:
        """A gauge; labels as in `counter`."""
        return self._add(Gauge, name, help, labels)

    def histogram(
        self, name: str, help: str, buckets: Sequence[float], **labels: Sequence[str]
    ) -> Histogram:
        """A histogram; labels as in `counter`."""

        def make(
            name: str, help: str, names: Sequence[str], registry: CollectorRegistry
        ) -> Histogram:
            return Histogram(name, help, names, registry=registry, buckets=buckets)

        return self._add(make, name, help, labels)

    def _add(
        self, make: Callable[..., M], name: str, help: str, labels: dict[str, Sequence[str]]
    ) -> M:
        metric = make(name, help, tuple(labels), registry=self._registry)
        if labels and all(labels.values()):
            for values in itertools.product(*labels.values()):
                metric.labels(*values)
        kind = "histogram" if isinstance(metric, Histogram) else type(metric).__name__.lower()
        self.rows.append(Declared(name, kind, tuple(labels), help))
        return metric


def encode(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """Everything on a registry and its content type: OpenMetrics where `accept` names it, else Prometheus text.

    Names are never escaped: the aliases hold colons, which the library's default turns into underscores.
    """
    if any(part.partition(";")[0].strip() == OPENMETRICS for part in accept.split(",")):
        body = cast("Any", openmetrics).generate_latest(registry, escaping=openmetrics.ALLOWUTF8)
        return body, openmetrics.CONTENT_TYPE_LATEST
    return exposition.generate_latest(registry), exposition.CONTENT_TYPE_PLAIN_0_0_4
