"""What is refused over pipeline stages, against the golden table: the first rule of ours that a case violates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from k3.config.commandline import CommandLine
from k3.config.load import load_engine
from k3.config.pipeline import PIPELINE_RULES, Option, Pipeline

pytestmark = pytest.mark.prefill

CASES = json.loads((Path(__file__).parent / "config_refusals.json").read_text())["cases"]


def pipeline(given: dict[str, Any]) -> Pipeline:
    options: dict[Option, bool] = {
        "two_batch_overlap": given["tbo"],
        "paged_checkpoints": given["ckpt_kind"] == "paged",
        "decode_graphs": given["cuda_graph"],
        "confidence": given["confidence"],
    }
    return Pipeline(
        role=given["role"],
        pp=given["pp"],
        model=given["model"],
        drafter=given["spec_method"],
        options=frozenset(name for name, is_on in options.items() if is_on),
        has_remote_kv="pp_remote_kv" in given["features"],
    )


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_the_first_violated_rule_is_the_golden_one(case: dict[str, Any]) -> None:
    facts = pipeline(case["in"])
    found = [rule.code for rule in PIPELINE_RULES if facts.role in rule.roles and rule.test(facts)]
    assert (found or ["ok"])[0] == case["out"]


@pytest.mark.parametrize("code", [rule.code for rule in PIPELINE_RULES])
def test_every_rule_says_why_and_what_to_do(code: str) -> None:
    (rule,) = (rule for rule in PIPELINE_RULES if rule.code == code)
    assert rule.why
    assert rule.remedy
    assert code in {case["out"] for case in CASES}


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("key", ["schedule.two_batch_overlap", "cache.checkpoint_kind"])
def test_what_no_key_can_switch_on_is_an_unknown_key(tmp_path: Path, role: str, key: str) -> None:
    """Rules about these guard the day such a key comes; until then the key itself is refused, over any stages."""
    section, name = key.split(".")
    file = tmp_path / "k3.yaml"
    file.write_text(f"{section}: {{{name}: paged}}\nparallel: {{pp: 1}}\n")
    problems = load_engine(role, CommandLine({}, file=file), {}).problems
    assert [problem.code for problem in problems] == ["UNKNOWN_KEY"]
