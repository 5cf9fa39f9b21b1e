"""A rendering of the chart: its objects, found by kind and component."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts/k3-serving"
VALUES = [CHART / "values.yaml", *sorted((CHART / "examples").glob("*.yaml"))]
ENGINES = ("prefill", "decode")
COMPONENTS = ("router", *ENGINES)
# What the chart asks of every process; tests/e2e/test_idle.py asks the processes for the same.
PROBES = {"startup": "/startup", "liveness": "/health", "readiness": "/ready"}


@dataclass(frozen=True, slots=True)
class Rendered:
    """The objects of one rendering."""

    objects: tuple[dict[str, Any], ...]

    def get(self, kind: str, component: str) -> dict[str, Any]:
        """The object of this kind that belongs to a component."""
        (found,) = [
            o
            for o in self.objects
            if o["kind"] == kind
            and o["metadata"]["labels"]["app.kubernetes.io/component"] == component
        ]
        return found

    def workload(self, component: str) -> dict[str, Any]:
        """Deployment or StatefulSet of a component."""
        return self.get("Deployment" if component == "router" else "StatefulSet", component)

    def pod(self, component: str) -> dict[str, Any]:
        """Its pod's spec."""
        return self.workload(component)["spec"]["template"]["spec"]

    def container(self, component: str) -> dict[str, Any]:
        """Its only container."""
        (container,) = self.pod(component)["containers"]
        return container

    def config(self, component: str) -> str:
        """The YAML its process reads."""
        return self.get("ConfigMap", component)["data"]["config.yaml"]


Helm = Callable[..., subprocess.CompletedProcess[str]]
