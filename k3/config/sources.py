"""Reads the sources of a configuration in order: defaults < preset < YAML < environment < flags.

`merge` returns the value of every key, where it came from, and every problem found on the way (unknown keys, values of
the wrong type or outside their range): nothing stops at the first. Files are read here; the environment and the
arguments come in as values.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml

from k3.config.keys import Value, keys_of, sections_of, suggest
from k3.config.presets import PRESETS
from k3.config.rule import Refusal
from k3.config.tree import EngineConfig, RouterConfig

TREES: tuple[type, ...] = (EngineConfig, RouterConfig)
# Set-up and the chart's checks read these; a front hands the last one to its ranks.
NO_KEYS = frozenset({"K3_VENV", "K3_HELM", "K3_RANK_TOKEN"})
# Kubernetes tells every pod where the services of its namespace are, and ours are called k3-...
SERVICE_LINK = re.compile(r"K3_\w+_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP)(_\w+)?)?)")


@dataclass(slots=True)
class Merged:
    """Values by dotted path, the source of each, and what was wrong."""

    values: dict[str, Value]
    sources: dict[str, str]
    problems: list[Refusal] = field(default_factory=list[Refusal])


def merge(
    tree: type,
    *,
    preset: str | None,
    file: Path | None,
    environ: Mapping[str, str],
    flags: Mapping[str, str],
) -> Merged:
    """Merge all sources for a configuration class. `flags` maps dotted paths to text."""
    merged = Merged({k.path: k.default for k in keys_of(tree).values()}, {})
    merged.sources = dict.fromkeys(merged.values, "default")
    if preset is not None:
        _merge_preset(tree, merged, preset)
    if file is not None:
        _merge_file(tree, merged, file)
    _merge_environment(tree, merged, environ)
    for path, text in flags.items():
        _set(tree, merged, path, text, f"flag {keys_of(tree)[path].flag}")
    return merged


def _set(tree: type, merged: Merged, path: str, raw: object, source: str) -> None:
    try:
        merged.values[path] = keys_of(tree)[path].parse(raw)
    except ValueError as error:
        merged.problems.append(
            Refusal("VALUE", f"{path}={raw!r}", str(error), f"correct it in the {source}")
        )
        return
    merged.sources[path] = source


def _merge_preset(tree: type, merged: Merged, name: str) -> None:
    if name not in PRESETS:
        why = f"there is no such preset{suggest(name, PRESETS)}"
        remedy = f"use one of {', '.join(PRESETS)}"
        merged.problems.append(Refusal("PRESET", f"--preset {name}", why, remedy))
        return
    for path, raw in PRESETS[name].items():
        if path in keys_of(tree):
            _set(tree, merged, path, raw, f"preset {name}")


def _merge_file(tree: type, merged: Merged, file: Path) -> None:
    try:
        document = cast("object", yaml.load(file.read_text(encoding="utf-8"), _StrictLoader))  # noqa: S506
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        text = " ".join(str(error).split())
        remedy = "give an existing YAML file to --config"
        merged.problems.append(
            Refusal("FILE", f"--config {file}", f"cannot be read: {text}", remedy)
        )
        return
    if document is not None:
        _merge_mapping(tree, merged, document, "", f"file {file}")


def _merge_mapping(tree: type, merged: Merged, node: object, prefix: str, source: str) -> None:
    if not isinstance(node, dict):
        where = prefix.rstrip(".") or "the document"
        merged.problems.append(
            Refusal(
                "SECTION",
                f"{where}={node!r}",
                "expected a mapping of keys",
                f"correct the {source}",
            )
        )
        return
    keys, sections = keys_of(tree), {f"{s}." for s in sections_of(tree)}
    for name, raw in cast("dict[object, object]", node).items():
        path = f"{prefix}{name}"
        if path in keys:
            _set(tree, merged, path, raw, source)
        elif f"{path}." in sections:
            _merge_mapping(tree, merged, raw, f"{path}.", source)
        else:
            known = [*keys, *(s.rstrip(".") for s in sections)]
            why = f"there is no such key{suggest(path, known)}"
            merged.problems.append(
                Refusal("UNKNOWN_KEY", path, why, f"remove or rename it in the {source}")
            )


def _merge_environment(tree: type, merged: Merged, environ: Mapping[str, str]) -> None:
    """`K3_SECTION__KEY`; variables of the other kind of process are left to it, any other `K3_` name is refused."""
    variables = {k.variable: k.path for k in keys_of(tree).values()}
    elsewhere = {k.variable for other in TREES for k in keys_of(other).values()}
    for name, text in sorted(environ.items()):
        if name in variables:
            _set(tree, merged, variables[name], text, f"environment {name}")
        elif name.startswith("K3_") and name not in elsewhere and name not in NO_KEYS:
            meant = {known.replace("__", "_"): known for known in elsewhere}.get(name)
            if meant is None and SERVICE_LINK.fullmatch(name):
                continue
            why = f"there is no such key{suggest(meant or name, elsewhere)}"
            merged.problems.append(
                Refusal("UNKNOWN_KEY", name, why, "unset or rename the variable")
            )


class _StrictLoader(yaml.SafeLoader):
    """The safe loader, refusing a key that is given twice in one mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """As the safe loader's; raises ConstructorError on a repeated key."""
        seen: set[object] = set()
        for key_node, _value in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue  # no key of ours, and the safe loader says so
            if key_node.value in seen:
                text = f"the key {key_node.value!r} is given twice"
                raise yaml.constructor.ConstructorError(None, None, text, key_node.start_mark)
            seen.add(key_node.value)
        return super().construct_mapping(node, deep=deep)
