"""The command line of every process: flags from the keys of its tree, aliases, and what --check prints.

`parse` returns what was said, with unknown flags as problems instead of an early exit, so that everything wrong is
reported at once. Nothing is merged or judged here.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version as distribution_version
from itertools import groupby
from pathlib import Path
from typing import cast

from k3.config.keys import Key, Value, flatten, keys_of, suggest
from k3.config.presets import PRESETS
from k3.config.rule import Refusal

ENGINE_ALIASES = {
    "--model": "model.path",
    "--pp": "parallel.pp",
    "--tp": "parallel.tp",
    "--cp": "parallel.cp",
    "--page-tokens": "cache.page_tokens",
    "--pages": "cache.pages",
    "--state-slots": "cache.state_slots",
    "--max-rows": "schedule.max_rows",
    "--depth": "schedule.depth",
    "--draft-tokens": "spec.draft_tokens",
    "--drafter": "spec.drafter",
    "--host": "serve.host",
    "--port": "serve.port",
    "--ops-port": "serve.ops_port",
    "--tls-cert": "serve.tls_cert",
    "--tls-key": "serve.tls_key",
    "--tls-ca": "serve.tls_ca",
    "--tls-client-auth": "serve.tls_client_auth",
    "--drain-delay": "serve.drain_delay_s",
    "--drain-timeout": "serve.drain_timeout_s",
    "--stall-timeout": "serve.stall_timeout_s",
    "--log-format": "telemetry.log_format",
    "--log-level": "telemetry.log_level",
    "--metrics-compat": "telemetry.metrics_compat",
}
ROUTER_ALIASES = {
    "--model": "model.path",
    "--host": "http.host",
    "--port": "http.port",
    "--admin-port": "http.admin_port",
    "--max-body-bytes": "http.max_body_bytes",
    "--request-timeout": "http.request_timeout_s",
    "--cors-origin": "http.cors_origins",
    "--per-request-spec-stats": "http.per_request_spec_stats",
    "--drain-delay": "http.drain_delay_s",
    "--drain-timeout": "http.drain_timeout_s",
    "--log-format": "telemetry.log_format",
    "--log-level": "telemetry.log_level",
    "--metrics-compat": "telemetry.metrics_compat",
}


METAVARS = {"bool": "BOOL", "int": "N", "float": "X", "str": "TEXT", "list": "A,B"}


@dataclass(frozen=True, slots=True)
class CommandLine:
    """What the arguments said. `flags` holds text by dotted path; `action` is "run", "check" or "schema"."""

    flags: Mapping[str, str]
    preset: str | None = None
    file: Path | None = None
    action: str = "run"
    problems: tuple[Refusal, ...] = ()


def version() -> str:
    """Version of the installed distribution."""
    return distribution_version("k3-serving")


def parse(program: str, tree: type, aliases: Mapping[str, str], argv: Sequence[str]) -> CommandLine:
    """Read arguments. --help and --version print and exit with 0."""
    parser = argparse.ArgumentParser(
        prog=program,
        usage="%(prog)s [--config FILE] [--check] [--section-key VALUE ...]",
        allow_abbrev=False,
        description="Every key is also a line of the YAML file (section: key) and a variable "
        "K3_SECTION__KEY. Later wins: defaults < preset < YAML file < environment < flags.",
    )
    parser.add_argument("--version", action="version", version=f"{program} {version()}")
    parser.add_argument("--config", metavar="FILE", type=Path, help="YAML file")
    parser.add_argument("--preset", metavar="NAME", help=f"named overlay: {', '.join(PRESETS)}")
    parser.add_argument(
        "--check", action="store_true", help="show the configuration and every refusal, then exit"
    )
    parser.add_argument(
        "--config-schema", action="store_true", help="print the JSON Schema of the YAML file"
    )
    known = ["--help", "--version", "--config", "--preset", "--check", "--config-schema"]
    for section, keys in groupby(keys_of(tree).values(), lambda k: k.path.rpartition(".")[0]):
        known += _add_group(parser, section or "process", keys, aliases)
    parsed, unknown = parser.parse_known_args(argv)
    given = cast("dict[str, object]", vars(parsed))
    return CommandLine(
        flags={path: str(given[path]) for path in keys_of(tree) if given[path] is not None},
        preset=parsed.preset,
        file=parsed.config,
        action="schema" if parsed.config_schema else "check" if parsed.check else "run",
        problems=tuple(_unknown(program, unknown, known)),
    )


def _add_group(
    parser: argparse.ArgumentParser, section: str, keys: Iterable[Key], aliases: Mapping[str, str]
) -> list[str]:
    """Add the flags of one section; returns their names."""
    group = parser.add_argument_group(section)
    known: list[str] = []
    for key in keys:
        names = [flag for flag, path in aliases.items() if path == key.path]
        names = list(dict.fromkeys([*names, key.flag]))
        known += names
        metavar = {"s": "DURATION", "bytes": "SIZE"}.get(key.unit, METAVARS[key.kind])
        nargs, const = ("?", "true") if key.kind == "bool" else (None, None)
        group.add_argument(
            *names, dest=key.path, metavar=metavar, help=_help(key), nargs=nargs, const=const
        )
    return known


def _help(key: Key) -> str:
    shown = "" if key.default in ("", ()) else f" (default {_text(key.default)})"
    choices = f"; {', '.join(c for c in key.choices if c)}" if key.choices else ""
    return f"{key.help}{choices}{shown}".replace("%", "%%")


def _unknown(program: str, unknown: Sequence[str], known: Iterable[str]) -> Iterable[Refusal]:
    for i, text in enumerate(unknown):
        if not text.startswith("-") and i and unknown[i - 1].startswith("-"):
            continue  # the value of the unknown flag before it
        why = f"there is no such flag{suggest(text.partition('=')[0], known)}"
        yield Refusal("UNKNOWN_FLAG", text, why, f"see {program} --help")


def report(
    program: str, config: object, sources: Mapping[str, str], problems: Sequence[Refusal]
) -> str:
    """What --check prints: every key with its value and source, then every refusal."""
    values = flatten(config)
    width = max(len(path) for path in values)
    texts = {path: _text(value) for path, value in values.items()}
    middle = min(44, max(len(text) for text in texts.values()))
    lines = [f"{program} {version()}", ""]
    lines += [f"{p:<{width}}  {texts[p]:<{middle}}  {sources[p]}" for p in values]
    return "\n".join([*lines, "", refusals(problems), ""])


def refusals(problems: Sequence[Refusal]) -> str:
    """Every refusal with its remedy, for people."""
    if not problems:
        return "accepted: nothing is refused"
    lines = [f"refused: {len(problems)} problem{'s' if len(problems) > 1 else ''}"]
    for p in problems:
        lines += [f"  {p.code}: {p.values}", f"      why:    {p.why}", f"      remedy: {p.remedy}"]
    return "\n".join(lines)


def _text(value: Value) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case float():
            return f"{value:g}"
        case tuple():
            return ",".join(value) or "(none)"
        case _:
            return str(value) or "(empty)"
