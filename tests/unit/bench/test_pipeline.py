"""`k3-bench pipeline`: figures of a schedule that keeps its promises, and a refusal of what makes no sense."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from rich.console import Console

from k3.errors import ConfigError
from prefill_svc import pipeline_bench

pytestmark = pytest.mark.prefill


def arguments(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    pipeline_bench.add_arguments(parser)
    return parser.parse_args(argv)


def test_the_promises_are_kept_and_the_figures_written(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.json"
    args = arguments("--stages", "1,3", "--prompt", "1000", "--budget", "100", "--json", str(file))
    assert pipeline_bench.run(args, Console(quiet=True)) == 0
    found = json.loads(file.read_text())
    assert [row["stages"] for row in found["occupancy"]] == [1, 3]
    assert all(row["occupancy"] <= row["possible"] + 0.05 for row in found["occupancy"])
    assert found["occupancy"][1]["held"] < 0.5 < found["occupancy"][1]["forked"]
    assert all(row["waited_steps"] <= row["promised_steps"] for row in found["fairness"])
    assert all(row["long_s"] > row["long_alone_s"] for row in found["fairness"])


@pytest.mark.parametrize("argv", [("--stages", "none"), ("--shorts", "0"), ("--budget", "8")])
def test_arguments_that_make_no_sense_are_refused(argv: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        pipeline_bench.run(arguments(*argv), Console(quiet=True))
