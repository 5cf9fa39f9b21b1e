"""Bring the generated part of the chart's values.schema.json up to date with the configuration trees.

`definitions.engineConfig` and `definitions.routerConfig` are the schemas of the processes' own YAML, less the keys
that the chart sets itself. Run as `python .ci/chart_schema.py`; tests/chart checks that nothing is left to change.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from k3.config.keys import json_schema
from k3.config.tree import EngineConfig, RouterConfig

SCHEMA = Path(__file__).resolve().parent.parent / "charts/k3-serving/values.schema.json"
CHART_OWNED = {
    "engineConfig": [
        "role",
        "model.path",
        "model.name",
        "model.device",
        "transfer.port_range",
        "serve.host",
        "serve.port",
        "serve.ops_host",
        "serve.ops_port",
        "serve.prefills",
        "serve.drain_delay_s",
        "serve.drain_timeout_s",
    ],
    "routerConfig": [
        "model.path",
        "model.name",
        "http.host",
        "http.port",
        "http.admin_host",
        "http.admin_port",
        "http.api_key_file",
        "http.admin_key_file",
        "http.drain_delay_s",
        "http.drain_timeout_s",
        "fleet.prefills",
        "fleet.decodes",
    ],
}


def without(schema: dict[str, Any], owned: list[str]) -> dict[str, Any]:
    """`schema` less the keys at these dotted paths. KeyError when one does not exist."""
    for path in owned:
        *sections, name = path.split(".")
        node = schema
        for section in sections:
            node = node["properties"][section]
        del node["properties"][name]
    return schema


def current() -> str:
    """The file as it should be."""
    tree = json.loads(SCHEMA.read_text())
    for name, config in (("engineConfig", EngineConfig), ("routerConfig", RouterConfig)):
        schema = json_schema(config, name)
        del schema["$schema"]
        tree["definitions"][name] = without(schema, CHART_OWNED[name])
    return json.dumps(tree, indent=2) + "\n"


if __name__ == "__main__":
    SCHEMA.write_text(current())
