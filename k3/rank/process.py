"""One rank as a subprocess: its command line and environment, its output in our log, signals and its end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections import deque

from k3.config.tree import EngineConfig
from k3.rank.channel import UnixAddress
from k3.transfer.agent import BATCHES

log = logging.getLogger("k3.rank")

TOKEN_VARIABLE = "K3_RANK_TOKEN"
LEVELS = {
    name: getattr(logging, name) for name in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
}
TAIL_LINES = 20
READ_BYTES = 1 << 16


def environment(config: EngineConfig, token: str) -> dict[str, str]:
    """A rank's environment. What UCX, NIXL and gloo need beyond their defaults gives way to what the user set."""
    wanted = {
        "UCX_TCP_USER_TIMEOUT": "5s",
        "NIXL_LOG_LEVEL": "WARN",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": str(max(1, config.backends.threads)),
    }
    if config.model.device == "cuda":
        wanted[BATCHES] = "1"
    if config.transfer.port_range:
        wanted["UCX_TCP_PORT_RANGE"] = config.transfer.port_range
    return {**wanted, **os.environ, TOKEN_VARIABLE: token}


class RankProcess:
    """A spawned rank."""

    def __init__(self, number: int, process: asyncio.subprocess.Process) -> None:
        self._number = number
        self._process = process
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)

    @classmethod
    async def spawn(
        cls,
        service: str,
        number: int,
        front: UnixAddress,
        env: dict[str, str],
        rendezvous: socket.socket | None = None,
    ) -> RankProcess:
        """Start `python -m k3.rank`; it dials `front` and dies with this process.

        rendezvous: the listening socket of its group's store, which it inherits.
        """
        inherited = () if rendezvous is None else (rendezvous.fileno(),)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "k3.rank"),
            *("--service", service, "--rank", str(number)),
            *("--front", str(front), "--parent", str(os.getpid())),
            *(word for fd in inherited for word in ("--rendezvous-fd", str(fd))),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=env,
            pass_fds=inherited,
        )
        return cls(number, process)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it has not been reaped."""
        return self._process.returncode is None

    @property
    def last_output(self) -> str:
        """Its newest line, for error messages."""
        return self._tail[-1] if self._tail else "nothing"

    @property
    def end(self) -> str:
        """How it ended, for people."""
        code = self._process.returncode
        if code is None:
            return "no end"
        return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"

    async def wait(self) -> int:
        """Reap it; the exit code, negative for a signal."""
        return await self._process.wait()

    def wake_and_signal(self, number: signal.Signals) -> None:
        """Send a signal that a stopped process would not take before it goes on."""
        if self.is_running:
            self._process.send_signal(signal.SIGCONT)
            self._process.send_signal(number)

    async def forward_output(self) -> None:
        """Its lines go to the log under its number, at the level they name, until it closes them."""
        assert self._process.stdout is not None
        rest = b""
        while data := await self._process.stdout.read(READ_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._log(line)
            rest = rest[-READ_BYTES:]
        self._log(rest)

    def _log(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        if not text:
            return
        self._tail.append(text)
        word, _space, message = text.partition(" ")
        if word in LEVELS:
            log.log(LEVELS[word], "rank %d: %s", self._number, message)
        else:
            log.info("rank %d: %s", self._number, text)
