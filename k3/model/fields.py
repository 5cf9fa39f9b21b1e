"""Typed reads from a model's config.json; every error names the file and the field.

Nothing is defaulted: `size`, `count`, `flag`, `number`, `choice` and `layer_list` need the field, the
`nullable_` ones take an absent field for null.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from k3.errors import ModelError


class Fields:
    """One JSON object and the path that leads to it."""

    def __init__(self, values: Mapping[str, Any], path: str) -> None:
        self.values = values
        self.path = path

    def error(self, name: str, got: object, expected: str) -> ModelError:
        """The ModelError for a field of a wrong value."""
        return ModelError(f"{self.path}: {name}={got!r}: expected {expected}")

    def required(self, name: str, expected: str) -> Any:
        """The value of a field that must be there."""
        if name not in self.values:
            raise ModelError(
                f"{self.path}: required field {name!r} is missing: expected {expected}; fields of "
                "the model config are never defaulted, take it from the released config"
            )
        return self.values[name]

    def section(self, name: str) -> Fields:
        """A field that is an object."""
        value = self.required(name, "an object")
        if not isinstance(value, dict):
            raise self.error(name, value, "an object")
        return Fields(cast("dict[str, Any]", value), f"{self.path}: {name}")

    def _integer(self, name: str, value: Any, least: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(name, value, f"an integer of at least {least}")
        return value

    def size(self, name: str) -> int:
        """A required integer of at least 1."""
        return self._integer(name, self.required(name, "a positive integer"), 1)

    def count(self, name: str) -> int:
        """A required integer of at least 0."""
        return self._integer(name, self.required(name, "a non-negative integer"), 0)

    def nullable_size(self, name: str) -> int | None:
        """An integer of at least 1, or None."""
        value = self.values.get(name)
        return None if value is None else self._integer(name, value, 1)

    def flag(self, name: str) -> bool:
        """A required boolean."""
        value = self.required(name, "true or false")
        if not isinstance(value, bool):
            raise self.error(name, value, "true or false")
        return value

    def number(self, name: str) -> float:
        """A required number."""
        value = self.required(name, "a number")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, value, "a number")
        return float(value)

    def nullable_number(self, name: str) -> float | None:
        """A number, or None."""
        return None if self.values.get(name) is None else self.number(name)

    def choice(self, name: str, *allowed: str) -> str:
        """A required string out of `allowed`."""
        value = self.required(name, " or ".join(allowed))
        if value not in allowed:
            raise self.error(name, value, " or ".join(allowed) + "; nothing else is supported")
        return str(value)

    def layer_list(self, name: str) -> tuple[int, ...]:
        """A required list of 1-based layer numbers."""
        value = self.required(name, "a list of 1-based layer numbers")
        if not isinstance(value, list):
            raise self.error(name, value, "a list of 1-based layer numbers")
        return tuple(self._integer(name, item, 1) for item in cast("list[Any]", value))
