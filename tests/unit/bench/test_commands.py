"""The command line of `k3-bench`: what is said and refused before anything is started."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from k3.bench.__main__ import main

COMMANDS = "serve", "step", "eval", "spec", "calibrate", "prefix", "roofline", "pipeline"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def run(*words: str) -> tuple[int, str]:
        """Exit status and everything printed."""
        monkeypatch.setattr(sys, "argv", ["k3-bench", *words])
        with pytest.raises(SystemExit) as left:
            main()
        said = capsys.readouterr()
        return int(str(left.value.code)), said.out + said.err

    return run


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_has_a_line_of_help(command: str, run) -> None:
    status, text = run(command, "--help")
    assert status == 0
    flags = text.partition("\noptions:\n")[2].split("\n  -")[1:]
    assert len(flags) > 4
    assert [flag for flag in flags if "  " not in flag.strip()] == []


def test_a_result_without_a_folder_to_lie_in_is_refused_first(run, tmp_path: Path) -> None:
    status, text = run("step", "--json", str(tmp_path / "nowhere" / "step.json"))
    assert status == 2
    assert f"there is no folder {tmp_path / 'nowhere'}" in text


def test_a_result_that_would_be_a_folder_is_refused_first(run, tmp_path: Path) -> None:
    status, text = run("step", "--json", str(tmp_path))
    assert status == 2
    assert f"--json {tmp_path} is a folder" in text


@pytest.mark.parametrize("flag", ["--rate", "--wait-s", "--slo-ttft-ms"])
@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
def test_a_number_that_is_none_is_refused_first(run, flag: str, value: str) -> None:
    status, text = run("serve", f"{flag}={value}")
    assert status == 2
    assert f"{flag} {float(value)}: expected a number from 0" in text


def test_a_load_of_no_requests_is_refused(run) -> None:
    status, text = run("serve", "--local", "--requests", "0")
    assert status == 2
    assert "--requests 0" in text


def test_a_drafter_that_is_not_there_is_refused_before_the_runs_without_it(run, tmp_path) -> None:
    status, text = run("spec", "--drafter", str(tmp_path))
    assert status == 1
    assert f"{tmp_path}: expected at least one .safetensors file" in text
