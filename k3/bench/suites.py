"""The frozen evaluation suites in `k3/assets/eval/`: their names, their items, and how long an answer may be.

One item a line, `{id, turns, tools, answer, check}`; a large suite is xz-compressed. `k3-bench eval` asks them over
REST; `k3/assets/eval/README.md` says what each suite asks.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import k3
from k3.bench.scoring import CHECKS
from k3.errors import ConfigError

FOLDER = Path(k3.__file__).parent / "assets" / "eval"
NAMES = (
    "arith_seen",
    "arith_forms",
    "arith_skeletons",
    "passkey_1k",
    "passkey_4k",
    "passkey_8k",
    "facts16_1k",
    "facts16_4k",
    "facts16_8k",
    "copy",
    "lists",
    "tools",
    "chat",
    "open",
)
GROUPS = {
    "all": NAMES,
    "arithmetic": tuple(name for name in NAMES if name.startswith("arith_")),
    "recall": tuple(name for name in NAMES if name.startswith(("passkey_", "facts16_"))),
}
# Output tokens at most, by the first word of the suite's name.
_LONGEST = {"arith": 176, "copy": 176, "tools": 112, "open": 96, "chat": 64, "lists": 64}
_LONGEST_RECALL = 40


@dataclass(frozen=True, slots=True)
class Item:
    """One question. `answer` is None where there is no gold answer (check `none`)."""

    id: str
    turns: tuple[Mapping[str, str], ...]
    tools: tuple[Mapping[str, Any], ...] | None
    answer: str | None
    check: str


def choose(wanted: str) -> tuple[str, ...]:
    """Suites of `--suite`: names of suites or groups with commas between. ConfigError for an unknown one."""
    names = tuple(name.strip() for name in wanted.split(","))
    unknown = [name for name in names if name not in (*NAMES, *GROUPS)]
    if unknown:
        known = ", ".join((*GROUPS, *NAMES))
        raise ConfigError(f"unknown suites {unknown}; expected some of {known}")
    chosen = (suite for name in names for suite in GROUPS.get(name, (name,)))
    return tuple(dict.fromkeys(chosen))


def longest_answer(suite: str) -> int:
    """Limit of an answer in tokens, with room above every gold answer."""
    return _LONGEST.get(suite.split("_")[0], _LONGEST_RECALL)


def read(name: str, n_items: int = 0, folder: Path = FOLDER) -> list[Item]:
    """The first `n_items` of a suite, 0 = all. ConfigError when it is missing or a line is not an item."""
    plain, packed = folder / f"{name}.jsonl", folder / f"{name}.jsonl.xz"
    if packed.exists():
        text = lzma.decompress(packed.read_bytes()).decode()
    elif plain.exists():
        text = plain.read_text(encoding="utf-8")
    else:
        raise ConfigError(f"no suite {name!r} in {folder}; expected {plain.name} or {packed.name}")
    lines = text.splitlines()[: n_items or None]
    return [_item(line, f"{name}, line {number}") for number, line in enumerate(lines, start=1)]


def _item(line: str, where: str) -> Item:
    try:
        fields: dict[str, Any] = json.loads(line)
        turns: Sequence[Mapping[str, str]] = fields["turns"]
        tools: Sequence[Mapping[str, Any]] | None = fields["tools"]
        item = Item(
            str(fields["id"]),
            tuple(turns),
            tuple(tools) if tools else None,
            fields["answer"],
            str(fields["check"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{where}: {error!r}; expected {{id, turns, tools, answer, check}}"
        ) from error
    if item.check not in CHECKS or (item.answer is None) != (item.check == "none"):
        raise ConfigError(
            f"{where}: check {item.check!r} with answer {item.answer!r}; expected one of "
            f"{', '.join(CHECKS)}, and an answer for all but none"
        )
    return item
