"""`k3-router` as a process: exit codes, --check, and leaving on a signal."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

TINY = Path(__file__).parents[3] / "k3" / "assets" / "tiny"
DEADLINE_S = 30.0


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "router", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)


@contextmanager
def taken_port() -> Iterator[int]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield sock.getsockname()[1]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


FLAGS = (
    "--model-path",
    str(TINY),
    "--fleet-prefills",
    "127.0.0.1:1",
    "--fleet-decodes",
    "127.0.0.1:2",
)


def test_check_shows_the_configuration_and_starts_nothing() -> None:
    done = run(*FLAGS, "--check")
    assert done.returncode == 0, done.stderr
    assert "max_in_flight" in done.stdout


def test_a_port_in_use_is_exit_code_4_and_names_it() -> None:
    with taken_port() as port:
        done = run(*FLAGS, "--http-port", str(port), "--http-admin-port", "0")
    assert done.returncode == 4, done.stdout + done.stderr
    assert str(port) in done.stdout


def test_a_model_folder_without_chat_format_is_exit_code_3_and_says_what_to_do(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_bytes((TINY / "config.json").read_bytes())
    flags = ("--model-path", str(tmp_path), *FLAGS[2:])
    done = run(*flags, "--http-port", "0", "--http-admin-port", "0")
    assert done.returncode == 3, done.stdout + done.stderr
    assert "chat_format.json" in done.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_leaves_with_0(number: signal.Signals) -> None:
    port = free_port()
    flags = (
        *FLAGS,
        "--http-port",
        str(port),
        "--http-admin-port",
        "0",
        "--http-drain-delay-s",
        "0.1s",
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "router", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        limit = time.monotonic() + DEADLINE_S
        while not is_healthy(port):
            assert process.poll() is None, process.stdout.read() if process.stdout else ""
            assert time.monotonic() < limit
            time.sleep(0.02)
        assert httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 503
        process.send_signal(number)
        output, _ = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, output
    assert "Traceback" not in output


def is_healthy(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    except httpx.TransportError:
        return False
