"""The command line of a process of its own: aliases, help, --check, and the way out of wrong input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from k3.config import load
from k3.config.commandline import CommandLine
from k3.config.keys import keys_of
from k3.config.tree import EngineConfig

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"
ENGINE_KEYS = keys_of(EngineConfig)


def run(role: str, *argv: str) -> subprocess.CompletedProcess[str]:
    call = "load.router_config(argv)" if role == "router" else f"load.engine_config({role!r}, argv)"
    program = (
        f"import sys; from k3.config import load; argv = sys.argv[1:]; print(load.config_hash({call})); "
        "assert not {'torch', 'grpc', 'fastapi'} & set(sys.modules)"
    )
    return subprocess.run(
        [sys.executable, "-c", program, *argv],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_aliases_reach_their_keys_and_nothing_heavy_is_imported():
    done = run("decode", "--max-rows", "3", "--port=7001", "--page-tokens", "8", "--check")
    assert done.returncode == 0, done.stderr
    for line in ("schedule.max_rows", "serve.port", "cache.page_tokens"):
        assert "flag --" in next(text for text in done.stdout.splitlines() if text.startswith(line))
    assert run("router", "--port", "8123").returncode == 0


def test_start_up_prints_every_problem_to_stderr_and_exits_with_2():
    done = run("prefill", "--page-tokenz", "8", "--cp", "2", "--cache-pages", "many")
    assert (done.returncode, done.stdout) == (2, "")
    for word in (
        "did you mean --page-tokens?",
        "HELIX_PREFILL",
        "cache.pages='many'",
        "3 problems",
    ):
        assert word in done.stderr


def test_check_exits_with_2_and_shows_all_of_the_bad_example():
    done = run("decode", "--check", "--config", str(EXAMPLES / "bad.yaml"))
    assert done.returncode == 2
    assert "refused: 18 problems" in done.stdout
    assert done.stdout.count("remedy:") == 18


def test_check_lists_everything_that_context_parallel_decode_does_not_go_with():
    done = run("decode", "--check", "--config", str(EXAMPLES / "helix-refused.yaml"))
    assert done.returncode == 2
    for code in (
        *("HELIX_BOTH", "HELIX_PIPELINE", "HEADS", "LOCAL_PREFILL_CP", "PAGE_TOKENS"),
        *("DRAFTS_WITHOUT_DRAFTER", "GATE_HELIX", "CONFIDENCE_HELIX"),
    ):
        assert code in done.stdout
    judged = load.load_engine("decode", CommandLine({}, file=EXAMPLES / "helix-refused.yaml"), {})
    assert done.stdout.count("remedy:") == len(judged.problems) >= 9


@pytest.mark.parametrize("role", ["prefill", "decode", "router"])
def test_the_examples_are_accepted(role):
    done = run(role, "--check", "--config", str(EXAMPLES / f"{role}.yaml"))
    assert done.returncode == 0, done.stdout


def test_help_explains_every_key():
    done = run("prefill", "--help")
    text = " ".join(done.stdout.split())
    for key in ENGINE_KEYS.values():
        assert key.flag in text
        assert " ".join(key.help.split())[:30] in text


def test_version_and_schema_are_printed():
    assert run("router", "--version").stdout.startswith("k3-router ")
    schema = json.loads(run("decode", "--config-schema").stdout)
    assert schema["title"] == "k3-decode configuration"
