"""A prefill and a decode instance made of `MoverCore`s, `LocalAgent`s and a virtual clock, in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from k3.cache.layout import CacheLayout
from k3.config.tree import TransferConfig
from k3.model.spec import K3Spec
from k3.rank.mover import MoverCore
from k3.transfer.agent import TransferAgent
from k3.transfer.local import LocalFabric
from k3.transfer.plan import Sharding, expected_senders
from k3.v1 import plan_pb2, prefill_pb2
from tests.resharding import PAGE_TOKENS, Rank, Truth, make_ranks, make_spec, put, sharding

TICK_S = 0.005
PEER = "decode-1"


class Reached:
    """A step event that the test completes."""

    def __init__(self, is_reached: bool = True) -> None:
        self.is_reached = is_reached

    def query(self) -> bool:
        return self.is_reached


@dataclass
class Node:
    """One rank's mover and what it said so far."""

    core: MoverCore
    said: list[plan_pb2.TransferStatus] = field(default_factory=list)
    commands: list[plan_pb2.TransferCommand] = field(default_factory=list)

    def heard(self, kind: str) -> list:
        return [getattr(status, kind) for status in self.said if status.HasField(kind)]

    def tell(self, **command: object) -> None:
        self.commands.append(plan_pb2.TransferCommand(**command))

    def turn(self, now: float) -> None:
        taken, self.commands = self.commands, []
        self.core.turn(lambda: taken, now)
        self.said += self.core.take_statuses()

    @property
    def endpoint(self) -> prefill_pb2.RankEndpoint:
        """The newest introduction."""
        return self.heard("ready")[-1].endpoint


def geometry(side: Sharding) -> prefill_pb2.Geometry:
    return prefill_pb2.Geometry(
        pp=side.pp,
        tp=side.tp,
        cp=side.cp,
        stage_bounds=side.stage_bounds,
        n_pages=side.n_pages,
        n_slots=side.n_slots,
        slot_columns=side.slot_columns,
    )


class Net:
    """Both instances, connected by `connect`; `run` lets virtual time pass."""

    def __init__(
        self,
        *,
        kinds: str = "kmk",
        heads: int = 4,
        prefill: Sharding | None = None,
        decode: Sharding | None = None,
        config: TransferConfig | None = None,
        fabric: LocalFabric | None = None,
        memory: str = "DRAM",
    ) -> None:
        self.now = 0.0
        self.memory = memory
        self.spec: K3Spec = make_spec(kinds, heads)
        self.prefill = prefill or sharding(len(kinds))
        self.decode = decode or sharding(len(kinds), cp=2)
        self.config = config or TransferConfig()
        self.fabric = fabric or LocalFabric(lambda: self.now)
        self.fabric.clock = lambda: self.now
        self.senders = make_ranks(self.spec, self.prefill)
        self.receivers = make_ranks(self.spec, self.decode)
        self.expected = make_ranks(self.spec, self.decode)
        self.out = [self._node(i, self.prefill, rank) for i, rank in enumerate(self.senders)]
        self.into = [self._node(i, self.decode, rank) for i, rank in enumerate(self.receivers)]
        self.turn()

    def _node(self, number: int, side: Sharding, rank: Rank) -> Node:
        def build() -> TransferAgent:
            agent = self.fabric.build(f"r{number}")
            agent.register([replace(region, memory=self.memory) for region in rank.regions])
            return agent

        layout: CacheLayout = rank.layout
        core = MoverCore(
            rank=number,
            spec=self.spec,
            geometry=side,
            layout=layout,
            config=self.config,
            build=build,
            library_version="1.5.1",
            now=self.now,
        )
        return Node(core)

    def turn(self) -> None:
        self.fabric.progress()
        for node in (*self.out, *self.into):
            node.turn(self.now)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += TICK_S
            self.turn()

    def until(self, condition: Callable[[], bool], limit_s: float = 60.0) -> None:
        end = self.now + limit_s
        while not condition():
            assert self.now < end, f"nothing happened within {limit_s} virtual seconds"
            self.now += TICK_S
            self.turn()

    def connect(self, peer_id: str = PEER) -> None:
        ranks = [node.endpoint for node in self.into]
        command = plan_pb2.ConnectPeer(peer_id=peer_id, geometry=geometry(self.decode), ranks=ranks)
        before = [len(node.heard("peer_connected")) for node in self.out]
        for node in self.out:
            node.tell(connect_peer=command)
        self.until(
            lambda: all(
                len(node.heard("peer_connected")) > n
                for node, n in zip(self.out, before, strict=True)
            )
        )

    def expect(self, transfer_id: int, prompt_len: int, nonce: int = 7) -> None:
        for number, node in enumerate(self.into):
            senders = expected_senders(
                self.spec,
                self.prefill,
                self.decode,
                page_tokens=PAGE_TOKENS,
                prompt_len=prompt_len,
                rank=number,
            )
            node.tell(
                expect=plan_pb2.ExpectTransfer(
                    transfer_id=transfer_id, nonce=nonce, senders=senders
                )
            )

    def start(
        self,
        transfer_id: int,
        prompt_len: int,
        pages: list[int],
        *,
        slot: int = 1,
        nonce: int = 7,
        peer_id: str = PEER,
    ) -> None:
        destination = prefill_pb2.Destination(
            transfer_id=transfer_id, nonce=nonce, generation=1, pages=pages, state_slot=slot
        )
        command = plan_pb2.StartTransfer(
            transfer_id=transfer_id,
            nonce=nonce,
            peer_id=peer_id,
            destination=destination,
            prompt_len=prompt_len,
        )
        for node in self.out:
            node.tell(start=command)

    def copy(self, transfer_id: int, **fields: object) -> None:
        for node in self.out:
            node.tell(copy=plan_pb2.CopyPages(transfer_id=transfer_id, **fields))

    def abort(self, transfer_id: int) -> None:
        for node in self.out:
            node.tell(abort=plan_pb2.AbortTransfer(transfer_id=transfer_id))

    def fill(self, prompt_len: int, pages: list[int], targets: list[int], seed: int = 0) -> None:
        """Random caches of a prompt in prefill's pools (slot 2), and where they must end up (slot 1)."""
        truth = Truth.draw(self.spec, -(-prompt_len // PAGE_TOKENS), seed)
        put(truth, self.prefill, self.senders, pages, slot=2, owner=False)
        put(truth, self.decode, self.expected, targets, slot=1, owner=True)

    def assert_received(self) -> None:
        for rank, expected in zip(self.receivers, self.expected, strict=True):
            for name, pool in rank.pools.items():
                np.testing.assert_array_equal(pool, expected.pools[name], err_msg=name)

    def snapshot(self) -> list[dict[str, np.ndarray]]:
        return [{n: pool.copy() for n, pool in rank.pools.items()} for rank in self.receivers]

    def assert_unchanged(self, before: list[dict[str, np.ndarray]]) -> None:
        for rank, pools in zip(self.receivers, before, strict=True):
            for name, pool in rank.pools.items():
                np.testing.assert_array_equal(pool, pools[name], err_msg=name)
