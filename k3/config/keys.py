"""The keys of a configuration tree: one `Key` per leaf, and everything that follows from having that list.

`key` declares one as a field. A key knows its dotted path, its flag, its environment variable, its type and its
range, and turns whatever a source gave (a YAML value, or text) into a value of that type. `assemble` builds the
frozen tree from values by path, `flatten` is its inverse, `json_schema` describes the YAML file. Pure: no file, no
environment.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, cast, get_type_hints

T = TypeVar("T")
Value = bool | int | float | str | tuple[str, ...]

# The most an integer may be: counts travel in messages of 32 bits. Sizes in bytes do not.
_MOST = (1 << 31) - 1
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|)")
_DURATION_S = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB|TiB|kB|MB|GB|TB|)")
_SIZE_BYTES = {
    "": 1,
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_OTHER_NAMES = {"gpu": "cuda"}  # of choices
_BOOLS = {"true": True, "yes": True, "on": True, "1": True} | {
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}


def key(
    default: Any,
    help: str,
    *,
    unit: str = "",
    choices: tuple[str, ...] = (),
    least: float | None = None,
    most: float | None = None,
) -> Any:
    """A field with its one-line help.

    unit: "s", "bytes", "tokens" or ""; choices: allowed strings; least, most: allowed range of a number.
    """
    metadata = {"help": help, "unit": unit, "choices": choices, "least": least, "most": most}
    if isinstance(default, (list, dict)):
        raise TypeError("defaults must be immutable; use a tuple")
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Key:
    """One leaf of a tree. `kind` is "bool", "int", "float", "str" or "list"."""

    path: str
    kind: str
    default: Value
    help: str
    unit: str
    choices: tuple[str, ...]
    least: float | None
    most: float | None

    @property
    def flag(self) -> str:
        """`--section-key`."""
        return "--" + self.path.replace(".", "-").replace("_", "-")

    @property
    def variable(self) -> str:
        """`K3_SECTION__KEY`."""
        return "K3_" + self.path.replace(".", "__").upper()

    @property
    def expected(self) -> str:
        """What a value of this key looks like, for error messages."""
        if self.choices:
            return "one of " + ", ".join(repr(c) for c in self.choices)
        text = {
            "bool": "true or false",
            "int": "an integer",
            "float": "a number",
            "str": "text",
            "list": "a list of text (comma-separated on the command line)",
        }[self.kind]
        match self.unit:
            case "s":
                text = "a duration such as 30s, 500ms or 5m"
            case "bytes":
                text = "a size such as 512MiB or a number of bytes"
            case _:
                pass
        if self.least is not None and self.most is not None:
            return f"{text}, {self.least:g} to {self.most:g}"
        return text if self.least is None else f"{text}, at least {self.least:g}"

    def parse(self, raw: object) -> Value:
        """A value of this key from a YAML value or from text. Raises ValueError saying what was expected."""
        try:
            value = self._convert(raw)
        except OverflowError:  # beyond every float
            value = None
        if value is None or (isinstance(value, float) and not math.isfinite(value)):
            raise ValueError(f"expected {self.expected}")
        if isinstance(value, int) and abs(value) > _MOST and self.unit != "bytes":
            raise ValueError(f"expected {self.expected}, not beyond {_MOST}")
        if self.choices and value not in self.choices:
            name = str(value)
            name = _OTHER_NAMES.get(name.lower(), name)
            close = difflib.get_close_matches(name, self.choices, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"expected {self.expected}{hint}")
        if isinstance(value, int | float) and (
            (self.least is not None and value < self.least)
            or (self.most is not None and value > self.most)
        ):
            raise ValueError(f"expected {self.expected}")
        return value

    def _convert(self, raw: object) -> Value | None:
        match self.kind:
            case "bool":
                return raw if isinstance(raw, bool) else _BOOLS.get(str(raw).lower())
            case "int":
                return self._integer(raw)
            case "float":
                return self._number(raw)
            case "list":
                return _text_list(raw)
            case _:
                return self._text(raw)

    def _integer(self, raw: object) -> int | None:
        if isinstance(raw, int) and not isinstance(raw, bool):
            return raw
        if not isinstance(raw, str):
            return None
        if self.unit == "bytes" and (match := _SIZE.fullmatch(raw.strip())):
            return round(float(match[1]) * _SIZE_BYTES[match[2]])
        return int(raw) if re.fullmatch(r"[+-]?\d+", raw.strip()) else None

    def _number(self, raw: object) -> float | None:
        if isinstance(raw, int | float) and not isinstance(raw, bool):
            return float(raw)
        if not isinstance(raw, str):
            return None
        if self.unit == "s" and (match := _DURATION.fullmatch(raw.strip())):
            return float(match[1]) * _DURATION_S[match[2]]
        return float(raw) if re.fullmatch(r"[+-]?\d+(\.\d+)?", raw.strip()) else None

    def _text(self, raw: object) -> str | None:
        if isinstance(raw, bool) and {"on", "off"} <= set(self.choices):
            return "on" if raw else "off"  # YAML reads a bare on/off as a boolean
        return raw if isinstance(raw, str) else None


def _text_list(raw: object) -> tuple[str, ...] | None:
    if isinstance(raw, str):
        return tuple(part.strip() for part in raw.split(",") if part.strip())
    if isinstance(raw, list | tuple):
        items = cast("list[object] | tuple[object, ...]", raw)
        if all(isinstance(item, str) for item in items):
            return tuple(str(item) for item in items)
    return None


@cache
def keys_of(tree: type) -> Mapping[str, Key]:
    """Every leaf of a configuration class, by dotted path, in declaration order."""
    return {k.path: k for k in _walk(tree, "")}


def _walk(tree: type, prefix: str) -> Iterable[Key]:
    types = get_type_hints(tree)
    for f in fields(tree):
        kind = types[f.name]
        if is_dataclass(kind):
            yield from _walk(cast("type", kind), f"{prefix}{f.name}.")
            continue
        name = {bool: "bool", int: "int", float: "float", str: "str"}.get(kind, "list")
        meta = f.metadata
        yield Key(
            path=prefix + f.name,
            kind=name,
            default=cast("Value", f.default),
            help=meta["help"],
            unit=meta["unit"],
            choices=meta["choices"],
            least=meta["least"],
            most=meta["most"],
        )


def sections_of(tree: type) -> Mapping[str, type]:
    """The nested sections of a configuration class, by name."""
    types = get_type_hints(tree)
    return {f.name: types[f.name] for f in fields(tree) if is_dataclass(types[f.name])}


def suggest(name: str, known: Iterable[str]) -> str:
    """` did you mean ...?` or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def assemble(tree: type[T], values: Mapping[str, Value], prefix: str = "") -> T:
    """The frozen tree with `values` by dotted path; paths that are absent keep their defaults."""
    types = get_type_hints(tree)
    arguments: dict[str, Any] = {}
    for f in fields(cast("Any", tree)):
        path = prefix + f.name
        if is_dataclass(types[f.name]):
            arguments[f.name] = assemble(types[f.name], values, path + ".")
        elif path in values:
            arguments[f.name] = values[path]
    return tree(**arguments)


def flatten(config: object, prefix: str = "") -> dict[str, Value]:
    """Values by dotted path, in declaration order. Inverse of `assemble`."""
    values: dict[str, Value] = {}
    for f in fields(cast("Any", config)):
        value = getattr(config, f.name)
        if is_dataclass(value):
            values |= flatten(value, f"{prefix}{f.name}.")
        else:
            values[prefix + f.name] = value
    return values


def nested(values: Mapping[str, Value]) -> dict[str, Any]:
    """Values by dotted path as nested mappings, tuples as lists: the shape of the YAML file."""
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *section, name = path.split(".")
        where = tree
        for part in section:
            where = where.setdefault(part, {})
        where[name] = list(value) if isinstance(value, tuple) else value
    return tree


def json_schema(tree: type, title: str) -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of the YAML file of a configuration class; closed at every level."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        **_schema_object(tree),
    }


def _schema_object(tree: type) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    types = get_type_hints(tree)
    known = keys_of(tree)
    for f in fields(tree):
        if is_dataclass(types[f.name]):
            section = cast("type", types[f.name])
            properties[f.name] = {
                "description": (section.__doc__ or "").strip(),
                **_schema_object(section),
            }
        else:
            properties[f.name] = _schema_value(known[f.name])
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _schema_value(key: Key) -> dict[str, Any]:
    common = {"description": key.help}
    if key.kind == "list":
        return {
            **common,
            "type": "array",
            "items": {"type": "string"},
            "default": list(cast("tuple[str, ...]", key.default)),
        }
    common["default"] = cast("Any", key.default)
    if key.choices:
        return {**common, "enum": list(key.choices)}
    if key.kind in ("bool", "str"):
        return {**common, "type": {"bool": "boolean", "str": "string"}[key.kind]}
    number: dict[str, Any] = {"type": {"int": "integer", "float": "number"}[key.kind]}
    number |= {} if key.least is None else {"minimum": key.least}
    number |= {} if key.most is None else {"maximum": key.most}
    match key.unit:
        case "s":
            return {
                **common,
                "anyOf": [number, {"type": "string", "pattern": r"^\d+(\.\d+)?(ms|s|m|h)$"}],
            }
        case "bytes":
            pattern = r"^\d+(\.\d+)?(B|[KMGT]iB|[kMGT]B)$"
            return {**common, "anyOf": [number, {"type": "string", "pattern": pattern}]}
        case _:
            return {**common, **number}
