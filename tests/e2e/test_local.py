"""`k3-local` as a newcomer meets it: the demo, the README's curl line, --check, and that nothing stays behind."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from k3.bench.suites import read
from k3.demo import RECALL
from tests.e2e.cluster import children, is_alive, wait_for

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "k3.launch"]
READY_S = 90.0


class Local:
    """A `k3-local` in the background; its output in a file."""

    def __init__(self, log: Path, *flags: str) -> None:
        self._log = log
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [*COMMAND, "--port", "0", *flags],
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._log.read_text()

    def ready_url(self) -> str:
        def look() -> str | None:
            assert self.process.poll() is None, self.output
            found = re.search(r"ready: (http://\S+)/v1", self.output)
            return found[1] if found else None

        return wait_for(look, READY_S, "k3-local says ready") or ""

    def family(self) -> list[int]:
        """All descendants."""
        found: list[int] = []
        todo = [self.process.pid]
        while todo:
            more = children(todo.pop())
            found += more
            todo += more
        return found

    def end(self, sig: signal.Signals, deadline_s: float = 30.0) -> int:
        self.process.send_signal(sig)
        return self.process.wait(timeout=deadline_s)


@contextmanager
def running(log: Path, *flags: str) -> Iterator[Local]:
    local = Local(log, *flags)
    try:
        yield local
    finally:
        if local.process.poll() is None:
            local.process.kill()
            local.process.wait()


def shared_memory(pids: list[int]) -> set[Path]:
    """Files under /dev/shm that these processes have mapped or open."""
    found: set[Path] = set()
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
            links = [str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir()]
        except (FileNotFoundError, ProcessLookupError):
            continue
        names = [line.split(maxsplit=5)[-1] for line in maps.splitlines()] + links
        found |= {Path(n) for n in names if n.startswith("/dev/shm/") and "(deleted)" not in n}
    return found


def addresses(pids: list[int]) -> set[str]:
    """Addresses these processes listen on for TCP, as the kernel writes them."""
    links = {str(fd.readlink()) for pid in pids for fd in Path(f"/proc/{pid}/fd").iterdir()}
    sockets = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return {s[1].split(":")[0] for s in sockets if s[3] == "0A" and f"socket:[{s[9]}]" in links}


def expect_nothing_left(pids: list[int], files: set[Path], deadline_s: float) -> None:
    wait_for(
        lambda: not any(is_alive(pid) for pid in pids), deadline_s, f"all of {pids} have ended"
    )
    assert not [f for f in files if f.exists()]


def test_the_demo_streams_its_answers_and_leaves_with_zero() -> None:
    done = subprocess.run(
        [*COMMAND, "--demo"], capture_output=True, text=True, timeout=READY_S + 120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"TTFT \d+ ms \| ITL [\d.]+ ms \| [\d.]+ tokens/s", done.stdout)
    assert "Answer: 67" in done.stdout  # 5 * 17 - 3 * 6
    assert read(RECALL, 1)[0].answer in done.stdout
    length = re.search(r"\| ([\d.]+) tokens a step", done.stdout)
    assert length is not None
    assert float(length[1]) > 3
    assert re.search(r"speed-up [\d.]+, answers equal", done.stdout), done.stdout


def test_the_readmes_examples_work_and_a_signal_ends_all_of_it(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    with running(tmp_path / "log") as local:
        url = local.ready_url()
        pids = local.family()
        line = re.search(r"curl -s http://127.0.0.1:8000.*?\n.*?'\n", text, re.DOTALL)
        assert line is not None
        words = shlex.split(line[0].replace("http://127.0.0.1:8000", url).replace("\\\n", " "))
        answer = subprocess.run(words, capture_output=True, text=True, timeout=60)
        message = json.loads(answer.stdout)["choices"][0]["message"]
        assert "67" in message["content"]

        program = text.split("```python\n")[1].split("```")[0].replace("http://127.0.0.1:8000", url)
        client = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
        )
        assert (client.returncode, bool(client.stdout)) == (0, True), client.stderr

        files = shared_memory(pids)
        assert local.end(signal.SIGTERM) == 0
        expect_nothing_left(pids, files, deadline_s=10.0)


def test_nothing_listens_on_an_address_that_others_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    with running(tmp_path / "log") as local:
        local.ready_url()
        found = addresses(local.family())
        assert found
        assert {a for a in found if not a.endswith("0100007F")} == set()  # 127.0.0.1


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGKILL])
def test_no_process_and_no_shared_memory_stays_behind(tmp_path: Path, sig: signal.Signals) -> None:
    with running(tmp_path / "log") as local:
        local.ready_url()
        pids = local.family()
        assert len(pids) >= 5  # router, two fronts, two ranks
        files = shared_memory(pids)
        assert local.end(sig) == (-sig if sig == signal.SIGKILL else 0)
        expect_nothing_left(pids, files, deadline_s=10.0)


def test_a_signal_during_start_up_ends_everything(tmp_path: Path) -> None:
    with running(tmp_path / "log") as local:
        wait_for(lambda: len(local.family()) >= 3, 20.0, "the services are spawned")
        pids = local.family()
        assert local.end(signal.SIGTERM) == 0
        expect_nothing_left(pids, set(), deadline_s=10.0)


def test_a_signal_during_an_answer_is_no_failure(tmp_path: Path) -> None:
    with running(tmp_path / "log", "--ask", "Count from 1 to 90.") as local:
        wait_for(lambda: "\n> Count" in local.output, READY_S, "the question is asked")
        pids = local.family()
        assert local.end(signal.SIGINT) == 0, local.output
        assert "k3-local:" not in local.output
        expect_nothing_left(pids, set(), deadline_s=10.0)


def test_temporary_folders_of_a_killed_run_are_removed_by_the_next(tmp_path: Path) -> None:
    env = os.environ | {"TMPDIR": str(tmp_path)}
    stale = tmp_path / "k3-local-4194305-gone"  # above the largest pid of Linux
    stale.mkdir()
    mine = tmp_path / f"k3-local-{os.getpid()}-mine"
    mine.mkdir()
    done = subprocess.run(
        [*COMMAND, "--port", "0", "--start-timeout-s", "0.2"],
        env=env,
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert sorted(tmp_path.iterdir()) == [mine]


def test_check_shows_every_service_and_exits_with_zero() -> None:
    done = subprocess.run([*COMMAND, "--check"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("# prefill-0", "# decode-0", "# router"):
        assert name in done.stdout


def test_a_refused_flag_is_exit_code_2_with_its_reason_before_anything_is_ready() -> None:
    done = subprocess.run(
        [*COMMAND, "--port", "0", "--page-tokens", "48"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "48" in done.stderr
    assert "ready:" not in done.stdout
