"""The tables of defects name tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs/regressions.md"
ROW = re.compile(r"^\| (\d+) \| (.+?) \| ([KMN]) \| (.+?) \| (.+?) \|$", re.MULTILINE)
TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")
N_ROWS = 58

pytestmark = pytest.mark.prefill


@cache
def functions_of(path: str) -> frozenset[str]:
    """Functions of a test file."""
    body = ast.parse((ROOT / "tests" / path).read_text()).body
    return frozenset(node.name for node in body if isinstance(node, ast.FunctionDef))


def test_every_defect_of_pipelines_has_a_reason_and_a_test_that_exists() -> None:
    rows = ROW.findall(TABLE.read_text())
    assert [int(number) for number, *_ in rows] == list(range(1, N_ROWS + 1))
    for number, _defect, _kind, reason, named in rows:
        tests = TEST.findall(named)
        assert tests, f"row {number} names no test"
        assert reason.strip(), f"row {number} gives no reason"
        for path, name in tests:
            assert name in functions_of(path), f"row {number}: {path} has no {name}"
