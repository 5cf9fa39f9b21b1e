"""What `k3-bench calibrate` makes of measurements; the measuring itself needs a cluster."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from k3.bench import calibrate
from k3.calibration import Calibration, StepRates
from k3.errors import ConfigError

pytestmark = pytest.mark.dspark


def arguments(*line: str):
    parser = ArgumentParser()
    calibrate.add_arguments(parser)
    return parser.parse_args(["--output", "c.json", *line])


def test_sizes_ascend_and_a_slower_measurement_outweighs_a_faster_one():
    timed = [(8, 20.0), (1, 50.0), (8, 25.0), (64, 5.0), (2, 60.0), (16, 21.0)]
    found = calibrate.rates(timed)
    assert found == StepRates((1, 2, 8, 16, 64), (50.0, 50.0, 20.0, 20.0, 5.0))


def test_only_the_drafted_cluster_drafts_and_it_observes():
    args = arguments("--batch", "2", "16")
    drafted, plain = calibrate.options(args, 7), calibrate.options(args, 0)
    assert drafted.decode_flags[-2:] == ("--spec-draft-schedule", "observe")
    assert "--drafter" in drafted.prefill_flags
    assert "--drafter" not in plain.decode_flags
    assert plain.decode_flags[-2:] == ("--draft-tokens", "0")
    assert plain.decode_flags[:2] == ("--max-rows", "16")


def test_a_calibration_is_read_as_it_was_written(tmp_path: Path):
    drafting, plain = StepRates((1, 8), (40.0, 12.5)), StepRates((2, 3, 4), (9.0, 8.5, 8.0))
    found = Calibration("digest", (1.5, 0.75), drafting, plain)
    (tmp_path / "c.json").write_text(json.dumps(found.document()))
    assert Calibration.read(tmp_path / "c.json") == found
    assert replace(found, drafter="other") != found


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--draft-tokens", "0"), "--draft-tokens 0"),
        (("--batch", "4", "0"), "4, 0.*at least 1"),
        (("--output", "no/such/folder/c.json"), "no folder no/such/folder"),
    ],
)
def test_nonsense_is_refused_before_anything_starts(flags: tuple[str, ...], message: str):
    with pytest.raises(ConfigError, match=message):
        calibrate.run(arguments(*flags), Console())
