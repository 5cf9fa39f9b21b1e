"""The mover: one thread per rank that owns the transfer agent and talks to the front over the transfer connection.

`MoverCore` is the whole logic, one `turn` at a time, with time and commands given from outside: tests run it with a
`LocalAgent` and a virtual clock. `Mover` is the thread around it. Nobody else may call the agent: posts can block while
they copy, and the library is used without locks.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NoReturn

from k3.cache.layout import CacheLayout
from k3.config.tree import TransferConfig
from k3.model.spec import K3Spec
from k3.rank.channel import BlockingChannel
from k3.rank.context import StepEvent
from k3.transfer.agent import TransferAgent
from k3.transfer.incoming import Incoming
from k3.transfer.outgoing import Outgoing
from k3.transfer.peers import Peers, pool_of
from k3.transfer.plan import Sharding
from k3.v1 import plan_pb2, prefill_pb2

log = logging.getLogger("k3.transfer")

Status = plan_pb2.TransferStatus
HEARTBEAT_S = 1.0
SHORTEST_S, LONGEST_S = 50e-6, 1e-3  # sleep while handles live
EVENT_S = 200e-6  # sleep while a device event is awaited
RECEIVE_S, LONGEST_RECEIVE_S = 2e-3, 10e-3  # sleep while records are awaited
GPU_RECEIVE_S = 200e-6  # the same where a prompt's bytes take less than the other
OF_WAIT = 0.01  # it grows to this share of the time without any: a long prompt is not asked for 500 times a second


class MoverCore:
    """Commands and step events in, statuses out. `build` makes an agent with this rank's pools registered."""

    def __init__(
        self,
        *,
        rank: int,
        spec: K3Spec,
        geometry: Sharding,
        layout: CacheLayout,
        config: TransferConfig,
        build: Callable[[], TransferAgent],
        library_version: str,
        now: float,
        self_test: plan_pb2.SelfTest | None = None,
    ) -> None:
        self._rank = rank
        self._build = build
        self._library_version = library_version
        self._agent = build()
        self._outgoing = Outgoing(Peers(rank, spec, geometry, layout), config, self._agent)
        self._incoming = Incoming(rank, config.resend_after_s)
        self._events: deque[tuple[int, StepEvent]] = deque()
        self._beat_at = now
        self._changed_at = now
        self._pause_s = LONGEST_S
        has_gpu = any(region.memory == "VRAM" for region in self._agent.regions)
        self._receive_s = GPU_RECEIVE_S if has_gpu else RECEIVE_S
        self._statuses: list[Status] = [self._introduction(self_test)]

    def take_statuses(self) -> list[Status]:
        """What the front must be told, in order; emptied by the call."""
        taken, self._statuses = self._statuses, []
        return taken

    def step_done(self, step_id: int, event: StepEvent) -> None:
        """The step is launched; pieces behind it may go once the event is reached."""
        self._events.append((step_id, event))

    @property
    def wants_steps(self) -> bool:
        """Whether a step event would make pieces ready."""
        return self._outgoing.is_waiting_for_step

    def turn(
        self, take_commands: Callable[[], Sequence[plan_pb2.TransferCommand]], now: float
    ) -> None:
        """Take what arrived and move everything on by one step.

        Records are read before commands: a record can only be here after its `ExpectTransfer` was, so none is taken
        for foreign.
        """
        is_beat = now - self._beat_at >= HEARTBEAT_S
        notes = self._agent.notes() if is_beat or self._incoming.is_waiting else []
        for command in take_commands():
            self._obey(command, now)
        self._statuses += self._incoming.absorb(notes, now)
        self._statuses += self._incoming.overdue(now)
        while self._events and self._events[0][1].query():
            self._outgoing.step_completed(self._events.popleft()[0])
        if self._outgoing.turn(now):
            self._changed_at = now
        self._drain_outgoing()
        if self._outgoing.must_rebuild:
            self._rebuild("writes did not end in time", now)
        if is_beat:
            self._beat_at = now
            self._statuses.append(self._heartbeat())

    def sleep_s(self, now: float) -> float:
        """How long nothing needs doing, unless a command or a step comes."""
        until_beat = max(0.0, self._beat_at + HEARTBEAT_S - now)
        if self._outgoing.can_post:
            return 0.0
        if not self._outgoing.is_idle:
            if now - self._changed_at < LONGEST_S:
                self._pause_s = SHORTEST_S
            else:
                self._pause_s = min(2 * self._pause_s, LONGEST_S)
            return min(self._pause_s, until_beat)
        self._pause_s = SHORTEST_S
        if self._events and self.wants_steps:
            return min(EVENT_S, until_beat)
        waited_s = self._incoming.waited_s(now)
        if waited_s is None:
            return until_beat
        return min(max(self._receive_s, OF_WAIT * waited_s), LONGEST_RECEIVE_S, until_beat)

    def close(self) -> None:
        """Destroy the agent: nothing lands any more."""
        self._agent.close()

    def _obey(self, command: plan_pb2.TransferCommand, now: float) -> None:
        which = command.WhichOneof("command")
        match which:
            case "connect_peer":
                self._outgoing.connect(command.connect_peer, now)
            case "start":
                self._outgoing.start(command.start)
            case "copy":
                self._outgoing.copy(command.copy)
            case "abort":
                if not self._incoming.forget(command.abort.transfer_id):
                    self._outgoing.abort(command.abort.transfer_id, now)
            case "drop_peer":
                self._outgoing.drop(command.drop_peer.peer_id, now)
            case "resend":
                self._outgoing.resend(command.resend, now)
            case "expect":
                self._statuses += self._incoming.expect(command.expect, now)
            case "rebuild":
                self._rebuild("asked by the front", now)
            case None:
                raise ValueError(
                    "transfer command without content; front and ranks must run the same version"
                )
        self._drain_outgoing()

    def _rebuild(self, why: str, now: float) -> None:
        """The hard fence: what no wait can prove, destroying the agent does."""
        log.warning("rebuilding the transfer agent of rank %d: %s", self._rank, why)
        self._agent.close()
        self._agent = self._build()
        self._incoming.clear()
        self._outgoing.reset(self._agent, f"the transfer agent was rebuilt: {why}", now)
        self._drain_outgoing()
        self._statuses.append(self._introduction())

    def _drain_outgoing(self) -> None:
        self._statuses += self._outgoing.statuses
        self._outgoing.statuses.clear()

    def _introduction(self, self_test: plan_pb2.SelfTest | None = None) -> Status:
        endpoint = prefill_pb2.RankEndpoint(
            rank=self._rank,
            agent_name=self._agent.name,
            agent_metadata=self._agent.metadata(),
            pools=[pool_of(region) for region in self._agent.regions],
        )
        return Status(
            ready=plan_pb2.MoverReady(
                endpoint=endpoint, nixl_version=self._library_version, self_test=self_test
            )
        )

    def _heartbeat(self) -> Status:
        beat = plan_pb2.MoverHeartbeat(
            zombie_handles=self._outgoing.n_zombies,
            fenced_records=self._incoming.n_foreign,
            bytes_total=self._outgoing.bytes_total,
        )
        return Status(heartbeat=beat)


class Mover:
    """The thread. A failure in it ends the process: the front sees the connections close."""

    def __init__(
        self,
        make_core: Callable[[plan_pb2.SelfTest | None], MoverCore],
        channel: BlockingChannel,
        recording: AbstractContextManager[object],
        self_test: Callable[[], plan_pb2.SelfTest | None] = lambda: None,
    ) -> None:
        """recording: `Device.recording`. self_test: comes first and takes `recording` itself, where it must.

        make_core: is given what the test found. Both are called on the thread, to which agents and the GPU's context
        belong.
        """
        self._make_core = make_core
        self._self_test = self_test
        self._recording = recording
        self._channel = channel
        self._steps: deque[tuple[int, StepEvent]] = deque()
        self._wants_steps = False
        self._is_stopping = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._main, name="mover", daemon=True)

    def start(self) -> None:
        """Begin; the first status is the mover's introduction."""
        self._thread.start()

    def step_done(self, step_id: int, event: StepEvent) -> None:
        """From the step loop: `step_id` is launched, `event` marks its end."""
        self._steps.append((step_id, event))
        if self._wants_steps:
            os.eventfd_write(self._wake, 1)

    def stop(self, deadline_s: float) -> None:
        """Destroy the agent and end the thread."""
        self._is_stopping = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(deadline_s)

    def _main(self) -> None:
        try:
            found = self._self_test()
            with self._recording:
                core = self._make_core(found)
            try:
                self._loop(core)
            finally:
                core.close()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            if not self._is_stopping:
                _die("the front closed the transfer connection")
        except Exception:
            _die(f"mover failed:\n{traceback.format_exc()}")

    def _loop(self, core: MoverCore) -> None:
        while not self._is_stopping:
            while self._steps:
                core.step_done(*self._steps.popleft())
            with self._recording:
                core.turn(
                    lambda: self._channel.receive_ready(plan_pb2.TransferCommand), time.monotonic()
                )
            for status in core.take_statuses():
                self._channel.send(status)
            self._wants_steps = core.wants_steps
            if self._steps and self._wants_steps:
                continue  # handed over between the look and the flag
            readable, _w, _x = select.select(
                [self._channel, self._wake], [], [], core.sleep_s(time.monotonic())
            )
            if self._wake in readable:
                os.eventfd_read(self._wake)


def _die(why: str) -> NoReturn:
    """End the process at once: half a rank is worse than none."""
    os.write(2, f"CRITICAL k3.transfer {why}\n".encode())
    os._exit(1)
