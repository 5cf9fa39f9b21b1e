"""The whole system on one machine: router, prefill and decode as child processes on loopback.

`k3-local`, `k3-bench` and the tests with real processes all use this class, so what is tested is what a newcomer runs.
Invariants: a child dies with this process however it ends (PR_SET_PDEATHSIG); every child has its own session, so a
terminal's Ctrl-C reaches only us; temporary files of all children lie in one folder that `stop` removes, and folders
of a killed predecessor are removed at the next start. One thread must start and poll the children: the kernel ties
their lives to it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from k3.errors import K3Error
from k3.ports import free_ports
from k3.process import die_with_parent

OnLine = Callable[[str, str], None]
POLL_S = 0.05
STALE = "k3-local-"


class MemberFailed(K3Error):
    """A child ended or did not become ready. `exit_code` is None while it still runs."""

    code = "instance_failed"

    def __init__(self, name: str, exit_code: int | None, why: str, tail: Iterable[str]) -> None:
        last = "".join(f"\n  | {line}" for line in tail)
        super().__init__(f"{name} {why}; its last lines:{last or ' (none)'}")
        self.name = name
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Get:
    """Answer of one GET; status 0 = no answer."""

    status: int
    body: str


def get(address: str, path: str, timeout_s: float = 2.0) -> Get:
    """GET `http://address/path`; a refused or broken connection is status 0."""
    connection = http.client.HTTPConnection(address, timeout=timeout_s)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return Get(answer.status, answer.read().decode())
    except (OSError, http.client.HTTPException):
        return Get(0, "")
    finally:
        connection.close()


@dataclass(frozen=True, slots=True)
class Options:
    """What to start; the flag lists go to the processes as they are, after ours."""

    host: str = "127.0.0.1"
    port: int = 0  # of the API; 0 = any free one
    n_prefills: int = 1
    n_decodes: int = 1
    router_flags: tuple[str, ...] = ()
    prefill_flags: tuple[str, ...] = ()
    decode_flags: tuple[str, ...] = ()
    preset: str = "tiny-demo"  # of every process; empty = none
    env: tuple[tuple[str, str], ...] = ()


@dataclass(slots=True)
class Member:
    """One child process."""

    name: str
    module: str
    flags: tuple[str, ...]
    address: str  # of its main port
    ops: str  # host:port of /ready and /metrics
    env: Mapping[str, str] = field(default_factory=dict[str, str])  # of this one alone
    process: subprocess.Popen[str] | None = None
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=40))

    @property
    def pid(self) -> int:
        """Process id; 0 before the start."""
        return self.process.pid if self.process else 0

    def exit_code(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self.process.poll() if self.process else None

    def command(self) -> list[str]:
        """Its command line."""
        return [sys.executable, "-m", self.module, *self.flags]


class LocalCluster:
    """Start, watch and stop the children. Use as a context manager, or call `start` and `stop`."""

    def __init__(self, options: Options = Options(), *, on_line: OnLine | None = None) -> None:
        self.options = options
        self._on_line = on_line
        self._folder: Path | None = None
        ports = free_ports(2 * (options.n_prefills + options.n_decodes) + 2)
        port = options.port or ports.pop()
        self.url = f"http://{options.host}:{port}"
        self.admin = f"127.0.0.1:{ports.pop()}"
        self.prefills = [
            self._engine("prefill", i, ports.pop(), ports.pop(), options.prefill_flags)
            for i in range(options.n_prefills)
        ]
        self.decodes = [
            self._engine("decode", i, ports.pop(), ports.pop(), options.decode_flags)
            for i in range(options.n_decodes)
        ]
        self.router = self._router(f"{options.host}:{port}")
        self.members = [*self.prefills, *self.decodes, self.router]

    def _engine(self, role: str, i: int, port: int, ops_port: int, more: Sequence[str]) -> Member:
        flags = [*self._preset(), "--serve-port", port, "--serve-ops-port", ops_port, *more]
        address, ops = f"127.0.0.1:{port}", f"127.0.0.1:{ops_port}"
        return Member(f"{role}-{i}", f"{role}_svc", tuple(map(str, flags)), address, ops)

    def _router(self, address: str) -> Member:
        host, port = address.rsplit(":", 1)
        admin_host, admin_port = self.admin.split(":")
        prefills = ",".join(m.address for m in self.prefills)
        decodes = ",".join(m.address for m in self.decodes)
        flags = [*self._preset(), "--http-host", host, "--http-port", port]
        flags += ["--http-admin-host", admin_host, "--http-admin-port", admin_port]
        flags += ["--fleet-prefills", prefills, "--fleet-decodes", decodes]
        flags += self.options.router_flags
        return Member("router", "router", tuple(flags), address, address)

    def _preset(self) -> list[str]:
        return ["--preset", self.options.preset] if self.options.preset else []

    def __enter__(self) -> LocalCluster:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def member(self, name: str) -> Member:
        """By name: `router`, `prefill-0`, `decode-0`, ..."""
        return next(m for m in self.members if m.name == name)

    # -- start -------------------------------------------------------------------------------

    def start(
        self,
        deadline_s: float = 120.0,
        *,
        on_progress: Callable[[str, str], None] | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Start all and wait until each says ready; on failure all are stopped and MemberFailed is raised."""
        _remove_stale_folders()
        self._folder = Path(tempfile.mkdtemp(prefix=f"{STALE}{os.getpid()}-"))
        try:
            for member in self.members:
                self.spawn(member)
            self.wait_ready(deadline_s, on_progress=on_progress, should_stop=should_stop)
        except BaseException:
            self.stop(grace_s=2.0)
            raise

    def spawn(self, member: Member) -> None:
        """Start the process of one member; again once the last one has ended."""
        if self._folder is None:
            raise RuntimeError("the cluster is not started")
        # UCX would listen on the other addresses of this machine, too.
        env = {"UCX_NET_DEVICES": "lo"} | os.environ
        env |= {"PYTHONUNBUFFERED": "1", "TMPDIR": str(self._folder)}
        env |= dict(self.options.env) | dict(member.env)
        if member.process is not None:
            member.process.wait(timeout=10.0)
        member.tail.clear()
        member.process = subprocess.Popen(
            member.command(),
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )
        threading.Thread(target=self._pump, args=(member, member.process), daemon=True).start()

    def _pump(self, member: Member, process: subprocess.Popen[str]) -> None:
        if process.stdout is None:
            raise RuntimeError("spawned without a pipe")
        with process.stdout as lines:
            for line in lines:
                member.tail.append(line.rstrip("\n"))
                if self._on_line is not None:
                    self._on_line(member.name, line.rstrip("\n"))

    def wait_ready(
        self,
        deadline_s: float,
        *,
        on_progress: Callable[[str, str], None] | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Until every member answers /ready with 200; MemberFailed at its end or at the deadline."""
        end = time.monotonic() + deadline_s
        told: dict[str, str] = {}
        waiting = list(self.members)
        while waiting and not should_stop():
            self.check_alive()
            member = waiting[0]
            answer = get(member.ops, "/ready")
            detail = "ready" if answer.status == 200 else _reason(answer.body)
            if on_progress is not None and told.get(member.name) != detail:
                told[member.name] = detail
                on_progress(member.name, detail)
            if answer.status == 200:
                waiting.pop(0)
                continue
            if time.monotonic() > end:
                why = f"was not ready after {deadline_s:.0f} s ({detail})"
                raise MemberFailed(member.name, None, why, member.tail)
            time.sleep(POLL_S)

    def check_alive(self) -> None:
        """Raise MemberFailed when a child has ended."""
        for member in self.members:
            code = member.exit_code()
            if code is not None:
                time.sleep(POLL_S)  # its last lines are still in the pipe
                raise MemberFailed(member.name, code, f"ended with status {code}", member.tail)

    # -- stop --------------------------------------------------------------------------------

    def stop(self, grace_s: float = 15.0, should_hurry: Callable[[], bool] = lambda: False) -> None:
        """Ask the router to leave, then, with no request left, the engines; kill the rest after `grace_s`. Idempotent.

        should_hurry: once true, a second SIGTERM tells all of them to fail what still runs.
        """
        end = time.monotonic() + grace_s
        hurried = False
        for group in ([self.router], [*self.decodes, *self.prefills]):
            for member in group:
                _send(member, signal.SIGTERM)
            while any(_is_running(m) for m in group) and time.monotonic() < end:
                if should_hurry() and not hurried:
                    hurried = True
                    for member in self.members:
                        _send(member, signal.SIGTERM)
                time.sleep(POLL_S)
        for member in self.members:
            if _is_running(member):
                self.kill(member)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def kill(self, member: Member) -> None:
        """SIGKILL to one member, and wait for its end."""
        _send(member, signal.SIGKILL)
        if member.process is not None:
            member.process.wait(timeout=10.0)


def _send(member: Member, sig: signal.Signals) -> None:
    if member.process is not None and member.process.poll() is None:
        member.process.send_signal(sig)


def _is_running(member: Member) -> bool:
    return member.process is not None and member.process.poll() is None


def _reason(body: str) -> str:
    """First reason of a /ready body; `starting` while there is none."""
    try:
        reasons = json.loads(body)["reasons"]
        return f"{reasons[0]['code']}: {reasons[0]['detail']}"
    except (ValueError, KeyError, IndexError, TypeError):
        return "starting"


def _remove_stale_folders() -> None:
    """Folders of a predecessor that was killed: their owner's pid, which is in the name, is gone."""
    for folder in Path(tempfile.gettempdir()).glob(f"{STALE}*-*"):
        pid = folder.name.removeprefix(STALE).split("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            with contextlib.suppress(OSError):
                shutil.rmtree(folder)
