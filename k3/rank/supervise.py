"""`RankGroup`: the ranks of one engine as seen from its front: spawned, greeted, watched, and ended together.

Ranks are plain subprocesses that dial back over a Unix socket, twice each (plan and transfer), and prove themselves
with a token from their environment; when all have come, nobody else can. One rank lost is the group lost: a closed
connection, a RankError, an exit, a silent mover or an unanswered plan all end in one `GroupFailed` that names the rank
and the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from k3.config.tree import EngineConfig
from k3.errors import ConfigError, GroupFailed, K3Error, ModelError
from k3.rank.channel import AsyncChannel, UnixAddress, listen
from k3.rank.mailbox import Mailbox
from k3.rank.process import RankProcess, environment
from k3.v1 import plan_pb2

log = logging.getLogger("k3.rank")

HELLO_S = 10.0
SEND_S = 10.0
FAREWELL_S = 0.5
SILENCE_S = 10.0
WATCH_S = 0.5
DUMP_S = 1.0
KILL_S = 5.0  # what a killed rank may take to go
GRIEF_S = 0.5  # a closed connection waits this long for the reason
QUEUE = 4096
N_CHANNELS = 2

T = TypeVar("T")


@dataclass(slots=True)
class _Rank:
    """What is known of one rank; channels by connection."""

    process: RankProcess | None = None
    channels: dict[int, AsyncChannel] = field(default_factory=dict[int, AsyncChannel])
    is_ready: bool = False
    mover: plan_pb2.MoverReady | None = None
    beat_at: float = 0.0


class RankGroup:
    """All ranks of one engine. Used by one event loop; `start` once, `stop` always."""

    def __init__(
        self,
        service: str,
        config: EngineConfig,
        setup: plan_pb2.Setup,
        n_ranks: int,
        *,
        on_progress: Callable[[int, plan_pb2.LoadProgress], None],
    ) -> None:
        """service: prefill or decode. on_progress: called with (rank, progress) while the group starts."""
        self._service = service
        self._config = config
        self._setup = plan_pb2.Setup()
        self._setup.CopyFrom(setup)
        self._on_progress = on_progress
        self._ranks = [_Rank() for _ in range(n_ranks)]
        self.address = UnixAddress(f"\0k3-{service}-{secrets.token_hex(16)}")
        self._token = secrets.token_hex(16)
        self._results: Mailbox[plan_pb2.StepResult] = Mailbox(QUEUE)
        self._statuses: Mailbox[tuple[int, plan_pb2.TransferStatus]] = Mailbox(QUEUE)
        self._unanswered: deque[float] = deque()
        self._changed = asyncio.Event()
        self._failure: K3Error | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._is_stopping = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks, in flat order."""
        return [rank.process.pid for rank in self._ranks if rank.process is not None]

    # ------------------------------------------------------------------ start and stop

    async def start(self, deadline_s: float) -> list[plan_pb2.MoverReady]:
        """Spawn all ranks; returns their movers' introductions in flat order once every rank takes plans.

        Raises ModelError or ConfigError when a rank found the checkpoint or the configuration wrong, GroupFailed
        otherwise; the group is stopped then.
        """
        try:
            await self._spawn_all()
            async with asyncio.timeout(deadline_s):
                await self._all_ready()
        except TimeoutError as error:
            late = [r for r, rank in enumerate(self._ranks) if not rank.is_ready]
            await self.stop()
            raise GroupFailed(
                f"ranks {late} of {self._service} were not ready after {deadline_s:.0f} s"
            ) from error
        except K3Error:
            await self.stop()
            raise
        self._own(self._watch(), "watch")
        return [rank.mover for rank in self._ranks if rank.mover is not None]

    async def stop(self, grace_s: float = 5.0) -> None:
        """Ask the ranks to finish, kill those that have not after `grace_s`, reap all. Idempotent.

        Ranks ignore SIGINT and SIGTERM, which a terminal or a service manager sends to them too while we drain.
        """
        if self._is_stopping:
            return
        self._is_stopping = True
        farewell = plan_pb2.FrontMessage(shutdown=plan_pb2.Shutdown())
        for rank in self._ranks:
            channel = rank.channels.get(plan_pb2.CONNECTION_PLAN)
            if channel is not None:
                with contextlib.suppress(OSError, TimeoutError):
                    await channel.send(farewell, FAREWELL_S)
        is_lost = self._failure is not None or not all(rank.is_ready for rank in self._ranks)
        await self._reap(0.0 if is_lost else grace_s)
        if self._server is not None:
            self._server.close()
        for rank in self._ranks:
            for channel in rank.channels.values():
                channel.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail(GroupFailed(f"the ranks of {self._service} were stopped"))

    async def _spawn_all(self) -> None:
        self._server = await listen(self.address, self._greet)
        env = environment(self._config, self._token)
        with contextlib.ExitStack() as ours:
            store = ours.enter_context(self._rendezvous()) if len(self._ranks) > 1 else None
            for number, rank in enumerate(self._ranks):
                own = store if number == 0 else None
                rank.process = await RankProcess.spawn(
                    self._service, number, self.address, env, own
                )
                self._own(rank.process.forward_output(), f"output of rank {number}")
                self._own(self._await_exit(number, rank.process), f"exit of rank {number}")

    def _rendezvous(self) -> socket.socket:
        """Where the group meets: a listening socket for rank 0, so that nobody else can take its port meanwhile."""
        listener = socket.create_server(("127.0.0.1", 0), backlog=len(self._ranks))
        self._setup.rendezvous = f"127.0.0.1:{listener.getsockname()[1]}"
        return listener

    async def _all_ready(self) -> None:
        while not all(rank.is_ready and rank.mover is not None for rank in self._ranks):
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            await self._changed.wait()

    async def _reap(self, grace_s: float) -> None:
        processes = [rank.process for rank in self._ranks if rank.process is not None]

        async def all_ended(patience_s: float) -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await asyncio.gather(*(process.wait() for process in processes))

        await all_ended(grace_s)
        for process in processes:
            process.wake_and_signal(signal.SIGKILL)
        await all_ended(KILL_S)

    # ------------------------------------------------------------------ what the driver uses

    async def send_plan(self, plan: plan_pb2.StepPlan) -> None:
        """Give one plan to every rank. Raises GroupFailed."""
        message = plan_pb2.FrontMessage(plan=plan)
        self._unanswered.append(time.monotonic())
        for number in range(len(self._ranks)):
            await self._send(number, plan_pb2.CONNECTION_PLAN, message)

    async def next_result(self) -> plan_pb2.StepResult:
        """The acknowledgement of the oldest unanswered plan. Raises GroupFailed, also when it is overdue."""
        return await self._results.get()

    async def command(self, rank: int, command: plan_pb2.TransferCommand) -> None:
        """Give one command to a rank's mover. Raises GroupFailed."""
        await self._send(rank, plan_pb2.CONNECTION_TRANSFER, command)

    async def next_status(self) -> tuple[int, plan_pb2.TransferStatus]:
        """(rank, status) of any mover, heartbeats included. Raises GroupFailed."""
        return await self._statuses.get()

    async def _send(self, number: int, connection: int, message: Any) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            await self._ranks[number].channels[connection].send(message, SEND_S)
        except (OSError, TimeoutError) as error:
            await self._mourn(number, f"it takes no messages: {error or 'its buffer is full'}")
            raise self._failure or GroupFailed(f"rank {number} is gone") from error

    # ------------------------------------------------------------------ connections

    async def _greet(self, channel: AsyncChannel) -> None:
        """A new connection: only a rank of ours, once per connection kind, gets further."""
        try:
            async with asyncio.timeout(HELLO_S):
                hello = (await channel.receive(plan_pb2.RankMessage)).hello
        except (EOFError, ConnectionError, TimeoutError) as error:
            log.warning("connection without hello: %s", error)
            channel.close()
            return
        is_known = hello.rank < len(self._ranks) and secrets.compare_digest(
            hello.token.encode(), self._token.encode()
        )
        if not is_known or hello.connection in self._ranks[hello.rank].channels:
            log.warning("refused a connection that claims to be rank %d", hello.rank)
            channel.close()
            return
        self._ranks[hello.rank].channels[hello.connection] = channel
        if self._server is not None and all(len(r.channels) == N_CHANNELS for r in self._ranks):
            self._server.close()
        if hello.connection == plan_pb2.CONNECTION_PLAN:
            await channel.send(plan_pb2.FrontMessage(setup=self._setup), SEND_S)
            self._own(self._read_plans(hello.rank, channel), f"plans of rank {hello.rank}")
        else:
            self._own(self._read_statuses(hello.rank, channel), f"mover {hello.rank}")

    async def _read_plans(self, number: int, channel: AsyncChannel) -> None:
        rank = self._ranks[number]
        try:
            while True:
                message = await channel.receive(plan_pb2.RankMessage)
                match message.WhichOneof("message"):
                    case "progress":
                        self._on_progress(number, message.progress)
                    case "ready":
                        rank.is_ready = True
                        self._changed.set()
                    case "result":
                        if self._unanswered:
                            self._unanswered.popleft()
                        await self._results.put(message.result)
                    case "error":
                        log.error("rank %d failed\n%s", number, message.error.stack)
                        self._fail(_error_of(number, message.error))
                    case other:
                        raise ConnectionError(f"unexpected {other!r} on the plan connection")
        except (EOFError, ConnectionError) as error:
            await self._mourn(number, str(error))
        except K3Error:
            return  # the group has failed, nobody reads any more

    async def _read_statuses(self, number: int, channel: AsyncChannel) -> None:
        rank = self._ranks[number]
        try:
            while True:
                status = await channel.receive(plan_pb2.TransferStatus)
                rank.beat_at = time.monotonic()
                if rank.mover is None and status.HasField("ready"):
                    rank.mover = status.ready
                    self._changed.set()
                else:
                    await self._statuses.put((number, status))
        except (EOFError, ConnectionError) as error:
            await self._mourn(number, str(error))
        except K3Error:
            return  # the group has failed, nobody reads any more

    # ------------------------------------------------------------------ watching

    async def _watch(self) -> None:
        """Silent movers and unanswered plans. A late look proves that we were the ones asleep."""
        timeout_s = self._config.schedule.plan_timeout_s
        looked_at = time.monotonic()
        while self._failure is None:
            await asyncio.sleep(WATCH_S)
            now = time.monotonic()
            if now - looked_at > SILENCE_S / 2:
                for rank in self._ranks:
                    rank.beat_at = now
                self._unanswered = deque(now for _ in self._unanswered)
            looked_at = now
            for number, rank in enumerate(self._ranks):
                if now - rank.beat_at > SILENCE_S:
                    self._fail(self._lost(number, f"no sign of life for {SILENCE_S:.0f} s"))
            if self._unanswered and now - self._unanswered[0] > timeout_s:
                await self._dump_stacks()
                self._fail(
                    GroupFailed(
                        f"a plan was not answered within plan_timeout_s={timeout_s:g} s by the ranks of "
                        f"{self._service}; their stacks are in the log"
                    )
                )

    async def _dump_stacks(self) -> None:
        for rank in self._ranks:
            if rank.process is not None:
                rank.process.wake_and_signal(signal.SIGUSR1)
        await asyncio.sleep(DUMP_S)

    async def _await_exit(self, number: int, process: RankProcess) -> None:
        code = await process.wait()
        if not self._is_stopping:
            await asyncio.sleep(
                GRIEF_S
            )  # its last words, still in the connection, are the better reason
            await self._mourn(number, "its process ended")
        elif code not in (0, -signal.SIGKILL):
            log.warning("rank %d ended with %s", number, process.end)

    async def _mourn(self, number: int, reason: str) -> None:
        """Fail the group; the rank's exit status, when it comes soon, is the better reason."""
        process = self._ranks[number].process
        if process is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GRIEF_S):
                    await process.wait()
            if not process.is_running:
                reason = f"it ended with {process.end}"
        self._fail(self._lost(number, reason))

    def _lost(self, number: int, reason: str) -> GroupFailed:
        process = self._ranks[number].process
        last = "nothing" if process is None else process.last_output
        return GroupFailed(
            f"rank {number} of {self._service} is lost: {reason}; its last output: {last}"
        )

    def _fail(self, error: K3Error) -> None:
        """The first reason counts."""
        if self._failure is None:
            self._failure = error
            if not self._is_stopping:
                log.error("rank group failed: %s", error)
            self._results.fail(error)
            self._statuses.fail(error)
            self._changed.set()

    def _own(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=f"{self._service}: {name}")
        self._tasks.add(task)


def _error_of(number: int, error: plan_pb2.RankError) -> K3Error:
    """A rank's last word as an exception: what start-up must tell apart keeps its type."""
    kind, _colon, text = error.message.partition(": ")
    match kind:
        case "ModelError":
            return ModelError(text)
        case "ConfigError":
            return ConfigError(text)
        case _:
            return GroupFailed(f"rank {number} failed: {error.message}")
