"""A process that hosts the movers of one instance on real NIXL agents; the test drives it through a pipe.

Orders are tuples, first the name of a method of `Host`. Commands and statuses cross as serialised protobuf. The host
turns its movers all the time and answers an order when it is done.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from k3.config.tree import TransferConfig
from k3.rank.mover import MoverCore
from k3.transfer.plan import Sharding
from k3.v1 import plan_pb2
from tests.movers import geometry
from tests.resharding import PAGE_TOKENS, Rank, Truth, make_ranks, make_spec, put

ANSWER_S = 30.0


class Always:
    """The event of a step that is complete."""

    def query(self) -> bool:
        return True


class Host:
    """The movers of one instance; `open` may be called again for another shape."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._cores: list[MoverCore] = []
        self._ranks: list[Rank] = []
        self._expected: list[Rank] = []
        self._commands: list[list[plan_pb2.TransferCommand]] = []

    def serve(self) -> None:
        while True:
            for number, core in enumerate(self._cores):
                taken, self._commands[number] = self._commands[number], []
                core.turn(lambda taken=taken: taken, time.monotonic())
                for status in core.take_statuses():
                    if not status.HasField("heartbeat"):
                        self._pipe.send((number, status.SerializeToString()))
            now = time.monotonic()
            pause = min((core.sleep_s(now) for core in self._cores), default=1.0)
            if not self._pipe.poll(pause):
                continue
            order, *arguments = self._pipe.recv()
            if order == "end":
                break
            self._pipe.send((None, getattr(self, order)(*arguments)))
        for core in self._cores:
            core.close()

    def open(self, kinds: str, heads: int, side: Sharding, config: TransferConfig) -> None:
        from k3.transfer.nixl import NIXL_VERSION, NixlAgent

        for core in self._cores:
            core.close()
        self._spec, self._side = make_spec(kinds, heads), side
        self._ranks = make_ranks(self._spec, side)
        self._expected = make_ranks(self._spec, side)

        def build(rank: Rank) -> NixlAgent:
            agent = NixlAgent("test")
            agent.register(rank.regions)
            return agent

        self._cores = [
            MoverCore(
                rank=number,
                spec=self._spec,
                geometry=side,
                layout=rank.layout,
                config=config,
                build=lambda rank=rank: build(rank),
                library_version=NIXL_VERSION,
                now=time.monotonic(),
            )
            for number, rank in enumerate(self._ranks)
        ]
        self._commands = [[] for _ in self._ranks]

    def tell(self, rank: int, command: bytes) -> None:
        self._commands[rank].append(plan_pb2.TransferCommand.FromString(command))

    def step_done(self, step_id: int) -> None:
        for core in self._cores:
            core.step_done(step_id, Always())

    def fill(self, prompt_len: int, pages: list[int], slot: int, seed: int) -> None:
        """Caches of a prompt in the pools of a prefill instance."""
        truth = Truth.draw(self._spec, -(-prompt_len // PAGE_TOKENS), seed)
        put(truth, self._side, self._ranks, pages, slot, owner=False)

    def hope(self, prompt_len: int, pages: list[int], slot: int, seed: int) -> None:
        """What the pools of a decode instance must hold in the end."""
        truth = Truth.draw(self._spec, -(-prompt_len // PAGE_TOKENS), seed)
        put(truth, self._side, self._expected, pages, slot, owner=True)

    def differing(self) -> list[tuple[int, str, list[int]]]:
        """(rank, pool, units) that are not as hoped."""
        found = []
        for number, (rank, expected) in enumerate(zip(self._ranks, self._expected, strict=True)):
            for name, pool in rank.pools.items():
                units = np.nonzero((pool != expected.pools[name]).any(axis=1))[0]
                if len(units):
                    found.append((number, name, units.tolist()))
        return found


def _main(pipe: Connection, namespace: str, device: str) -> None:
    if namespace:
        _enter(namespace)
        os.environ["UCX_NET_DEVICES"] = device
    try:
        Host(pipe).serve()
    except EOFError:
        sys.exit(0)


def _enter(namespace: str) -> None:
    """Move this process into a network namespace, with a /sys that shows its devices: UCX looks there."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, private, recursive = 0x20000, 1 << 18, 1 << 14
    with Path(f"/run/netns/{namespace}").open() as file:
        for failed in (
            libc.setns(file.fileno(), 0),
            libc.unshare(new_mounts),
            libc.mount(b"none", b"/", None, private | recursive, None),
            libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None),
        ):
            assert failed == 0, os.strerror(ctypes.get_errno())


class Remote:
    """The test's end of a host."""

    def __init__(self, namespace: str = "", device: str = "") -> None:
        """namespace: network namespace to live in, with its one device."""
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        arguments = (theirs, namespace, device)
        self.process = context.Process(target=_main, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        self.said: list[tuple[int, plan_pb2.TransferStatus]] = []

    def order(self, name: str, *arguments: Any) -> Any:
        """Have an order carried out; statuses that come in between are kept."""
        self.pipe.send((name, *arguments))
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline:
            if self.pipe.poll(0.1):
                rank, answer = self.pipe.recv()
                if rank is None:
                    return answer
                self.said.append((rank, plan_pb2.TransferStatus.FromString(answer)))
        raise AssertionError(f"no answer to {name} within {ANSWER_S} s")

    def open(self, kinds: str, heads: int, side: Sharding, config: TransferConfig) -> None:
        self.side = side
        self.said.clear()
        self.order("open", kinds, heads, side, config)
        self.wait("ready", side.size)

    def tell(self, rank: int, **command: Any) -> None:
        self.order("tell", rank, plan_pb2.TransferCommand(**command).SerializeToString())

    def tell_all(self, **command: Any) -> None:
        for rank in range(self.side.size):
            self.tell(rank, **command)

    def heard(self, kind: str) -> list[Any]:
        return [getattr(status, kind) for _rank, status in self.said if status.HasField(kind)]

    def wait(self, kind: str, n: int, limit_s: float = ANSWER_S) -> list[Any]:
        """At least n statuses of a kind."""
        deadline = time.monotonic() + limit_s
        while len(self.heard(kind)) < n:
            assert time.monotonic() < deadline, (
                f"{len(self.heard(kind))} of {n} {kind!r} within {limit_s} s; said: "
                f"{[status.WhichOneof('status') for _r, status in self.said]}"
            )
            if self.pipe.poll(0.1):
                rank, status = self.pipe.recv()
                self.said.append((rank, plan_pb2.TransferStatus.FromString(status)))
        return self.heard(kind)

    def connect(self, receiver: Remote, peer_id: str = "peer") -> None:
        endpoints = {ready.endpoint.rank: ready.endpoint for ready in receiver.heard("ready")}
        command = plan_pb2.ConnectPeer(
            peer_id=peer_id,
            geometry=geometry(receiver.side),
            ranks=[endpoints[rank] for rank in sorted(endpoints)],
        )
        n = len(self.heard("peer_connected"))
        self.tell_all(connect_peer=command)
        answers = self.wait("peer_connected", n + self.side.size)[n:]
        assert [answer.error for answer in answers] == [""] * self.side.size

    def end(self) -> None:
        if self.process.is_alive():
            try:
                self.pipe.send(("end",))
                self.process.join(5)
            except OSError:
                pass
        self.process.kill()
        self.process.join(5)
        self.pipe.close()
