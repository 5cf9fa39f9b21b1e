"""From command line to a resolved, judged configuration; the only reader of the environment.

`engine_config("prefill", argv)` and `router_config(argv)` are what a `main` calls: they answer --help, --version,
--check and --config-schema themselves, print every problem and refusal together on stderr and exit with 2, or return a
tree without anything left to decide. `load_engine` and `load_router` are the same without exits and output.
`to_json`, `engine_from_json` and `config_hash` carry a resolved tree to the ranks and name it.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar, cast

from k3.config.commandline import (
    ENGINE_ALIASES,
    ROUTER_ALIASES,
    CommandLine,
    parse,
    refusals,
    report,
    version,
)
from k3.config.idle import idle, silent_drafter
from k3.config.keys import assemble, flatten, json_schema, keys_of, nested
from k3.config.refusals import refuse, refuse_router
from k3.config.resolve import Machine, resolve_names, resolve_router, resolve_sizes
from k3.config.rule import Refusal
from k3.config.sources import merge
from k3.config.tree import EngineConfig, RouterConfig
from k3.errors import ConfigError, ModelError, RefusedError
from k3.model.spec import K3Spec

C = TypeVar("C", EngineConfig, RouterConfig)


@dataclass(frozen=True, slots=True)
class Loaded(Generic[C]):
    """A configuration, the source of every value, and everything that speaks against it."""

    config: C
    sources: Mapping[str, str]
    problems: tuple[Refusal, ...]

    def require(self) -> C:
        """The configuration. Raises RefusedError with every problem when there is one."""
        if self.problems:
            raise RefusedError(tuple(map(str, self.problems)))
        return self.config


def engine_config(role: str, argv: Sequence[str]) -> EngineConfig:
    """The resolved configuration of `k3-prefill` or `k3-decode`; exits with 0 or 2 instead when there is no start."""
    line = parse(f"k3-{role}", EngineConfig, ENGINE_ALIASES, argv)
    return _finish(f"k3-{role}", EngineConfig, line, load_engine(role, line, os.environ))


def router_config(argv: Sequence[str]) -> RouterConfig:
    """The resolved configuration of `k3-router`; exits with 0 or 2 instead when there is no start."""
    line = parse("k3-router", RouterConfig, ROUTER_ALIASES, argv)
    return _finish("k3-router", RouterConfig, line, load_router(line, os.environ))


def load_engine(role: str, line: CommandLine, environ: Mapping[str, str]) -> Loaded[EngineConfig]:
    """Merge, resolve and judge an engine's configuration. Never raises for what the user wrote."""
    merged = merge(
        EngineConfig, preset=line.preset, file=line.file, environ=environ, flags=line.flags
    )
    problems = [*line.problems, *merged.problems]
    allowed = ("decode", "both") if role == "decode" else (role,)
    if merged.values["role"] not in ("", *allowed):
        problems.append(
            Refusal(
                "ROLE",
                f"role={merged.values['role']!r} ({merged.sources['role']})",
                f"k3-{role} runs as {' or '.join(allowed)}",
                "start the other command, or leave role out",
            )
        )
        merged.values["role"] = role
    merged.values["role"] = merged.values["role"] or role
    raw = assemble(EngineConfig, merged.values)
    config = resolve_names(raw, Machine.here(environ))
    spec = _spec(config)
    problems += [*idle(raw, merged.sources), *refuse(config, spec)]
    if spec is not None and not problems:
        config = resolve_sizes(config, spec)
    return Loaded(config, _sources(raw, config, merged.sources), tuple(problems))


def load_router(line: CommandLine, environ: Mapping[str, str]) -> Loaded[RouterConfig]:
    """Merge, resolve and judge the router's configuration. Never raises for what the user wrote."""
    merged = merge(
        RouterConfig, preset=line.preset, file=line.file, environ=environ, flags=line.flags
    )
    raw = assemble(RouterConfig, merged.values)
    config = resolve_router(raw, Machine.here(environ))
    problems = (*line.problems, *merged.problems, *refuse_router(config))
    return Loaded(config, _sources(raw, config, merged.sources), problems)


def to_json(config: EngineConfig | RouterConfig) -> str:
    """Canonical JSON of a resolved tree."""
    return json.dumps(nested(flatten(config)), sort_keys=True, separators=(",", ":"))


def engine_from_json(text: str) -> EngineConfig:
    """Inverse of `to_json`. Raises ConfigError when the text is not a whole engine tree."""
    values = _paths(cast("object", json.loads(text)), "")
    keys = keys_of(EngineConfig)
    if values.keys() != keys.keys():
        differing = sorted(values.keys() ^ keys.keys())
        raise ConfigError(
            f"configuration handed to a rank differs in the keys {differing}; front and ranks must run the same version"
        )
    return assemble(EngineConfig, {path: keys[path].parse(raw) for path, raw in values.items()})


def config_hash(config: EngineConfig | RouterConfig) -> str:
    """Short name of a resolved tree: 12 hexadecimal digits."""
    return hashlib.sha256(to_json(config).encode()).hexdigest()[:12]


def _paths(node: object, prefix: str) -> dict[str, object]:
    if not isinstance(node, dict):
        return {prefix.rstrip("."): node}
    values: dict[str, object] = {}
    for name, child in cast("dict[str, object]", node).items():
        values |= _paths(child, f"{prefix}{name}.")
    return values


def _spec(config: EngineConfig) -> K3Spec | None:
    try:
        return K3Spec.from_folder(Path(config.model.path))
    except ModelError:
        return None  # MODEL_FOLDER or MODEL_CONFIG says what is wrong


def _sources(raw: object, config: object, sources: Mapping[str, str]) -> dict[str, str]:
    """Sources by path; a value that was resolved says so."""
    before, after = flatten(raw), flatten(config)
    return {
        path: source if before[path] == after[path] else f"{source}, resolved from {before[path]!r}"
        for path, source in sources.items()
    }


def _finish(program: str, tree: type, line: CommandLine, loaded: Loaded[C]) -> C:
    """Return the configuration to run with, or print what was asked for or what is wrong, and exit."""
    if line.action == "schema":
        schema = json_schema(tree, f"{program} configuration")
        sys.stdout.write(json.dumps(schema, indent=2) + "\n")
        raise SystemExit(0)
    if line.action == "check":
        sys.stdout.write(report(program, loaded.config, loaded.sources, loaded.problems))
        raise SystemExit(2 if loaded.problems else 0)
    if loaded.problems:
        sys.stderr.write(f"{program} {version()} does not start. {refusals(loaded.problems)}\n")
        raise SystemExit(2)
    if isinstance(loaded.config, EngineConfig) and (told := silent_drafter(loaded.config)):
        sys.stderr.write(f"{program}: {told}\n")
    return loaded.config
