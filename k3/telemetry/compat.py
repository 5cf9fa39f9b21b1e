"""Metrics under vLLM's names, for tools that look for them on `/metrics`: load generators, autoscalers.

An alias copies another metric at scrape time: same values, labels `model_name` and `engine="0"` added. Nothing is
counted here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample


class Source(Protocol):
    """A prometheus metric object."""

    def collect(self) -> Iterable[Metric]:
        """Its one family with all samples."""
        ...


@dataclass(frozen=True, slots=True)
class Alias:
    """`name` shows `source`; `only` keeps samples with these labels (and drops them), `rename` renames labels."""

    name: str
    source: Source
    only: Mapping[str, str] = field(default_factory=dict[str, str])
    rename: Mapping[str, str] = field(default_factory=dict[str, str])


class Aliases(Collector):
    """Collector of aliases for one model."""

    def __init__(self, aliases: Sequence[Alias], model_name: str) -> None:
        self._aliases = tuple(aliases)
        self._extra = {"model_name": model_name, "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        """One family per alias."""
        for alias in self._aliases:
            for family in alias.source.collect():
                copy = Metric(alias.name, family.documentation, family.type)
                copy.samples = [
                    self._renamed(alias, family, sample)
                    for sample in family.samples
                    if alias.only.items() <= sample.labels.items()
                ]
                yield copy

    def _renamed(self, alias: Alias, family: Metric, sample: Sample) -> Sample:
        labels = {
            alias.rename.get(name, name): value
            for name, value in sample.labels.items()
            if name not in alias.only
        }
        suffix = sample.name.removeprefix(family.name)
        return sample._replace(name=alias.name + suffix, labels=labels | self._extra)
