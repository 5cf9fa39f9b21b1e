"""A rendering of the chart: its objects by kind and component, its configurations as the processes read them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from k3.config.commandline import ENGINE_ALIASES, ROUTER_ALIASES, parse
from k3.config.load import load_engine, load_router
from k3.config.tree import EngineConfig, RouterConfig

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


def load(component: str, text: str, folder: Path) -> Any:
    """The process's own reading of its YAML; fails with every problem but the lack of a GPU here."""
    file = folder / f"{component}.yaml"
    file.write_text(text)
    # The image's model is the embedded one; a mounted folder does not exist here.
    argv = ["--config", str(file), "--model-path", ""]
    if component == "router":
        return load_router(parse("k3-router", RouterConfig, ROUTER_ALIASES, argv), {}).require()
    line = parse(f"k3-{component}", EngineConfig, ENGINE_ALIASES, argv)
    loaded = load_engine(component, line, {})
    problems = tuple(p for p in loaded.problems if p.code != "DEVICE")
    return replace(loaded, problems=problems).require()
