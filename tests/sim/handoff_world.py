"""A prefill handoff with scripted movers, a connected decode instance and a virtual clock."""

from __future__ import annotations

import asyncio

from k3.config.tree import TransferConfig
from k3.v1 import plan_pb2, prefill_pb2
from prefill_svc.core.scheduler import Policy, PrefillScheduler
from prefill_svc.export import Export
from prefill_svc.handoff import Handoff
from prefill_svc.peers import Peers
from tests.sim.prefill_ranks import (
    Clock,
    Movers,
    P,
    Pairing,
    Stream,
    connect,
    connect_request,
    identity,
    run_step,
)

N_PAGES, N_SLOTS = 40, 6
TIMES = TransferConfig(
    heartbeat_s=2.0, self_fence_s=15.0, drain_s=10.0, lease_s=30.0, transfer_deadline_s=30.0
)
QUIESCED = prefill_pb2.QUIESCE_STATE_QUIESCED
DRAINING = prefill_pb2.QUIESCE_STATE_STILL_DRAINING


class World:
    """One prefill instance with two ranks, one connected decode instance `d1`."""

    def __init__(self, *, n_ranks: int = 2, budget: int = 8, inflight: int = 1) -> None:
        self.clock = Clock()
        self.movers = Movers(n_ranks)
        policy = Policy(
            token_budget=budget,
            max_inflight=inflight,
            chunk_align=P,
            max_running=4,
            max_queue=4,
            short_len=budget,
        )
        self.scheduler = PrefillScheduler(policy, n_pages=N_PAGES, n_slots=N_SLOTS, page_tokens=P)
        self.peers = Peers(identity(), Pairing(), n_ranks, self.movers.command, self.clock)
        self.ended: list[Export] = []
        self.handoff = Handoff(
            peers=self.peers,
            prompts=self.scheduler,
            command=self.movers.command,
            clock=self.clock,
            times=TIMES,
            reserve_wait_s=30.0,
            n_ranks=n_ranks,
            page_tokens=P,
            on_end=self.ended.append,
        )
        self.movers.handoff_status = self.handoff.on_status
        asyncio.run(connect(self.peers, self.movers, connect_request("d1")))
        self.n_keys = 0

    def open(self, prompt_len: int) -> tuple[Export, Stream]:
        self.n_keys += 1
        stream = Stream()
        self.scheduler.submit(self.n_keys, prompt_len, self.clock())
        peer = self.peers.find("d1")
        return self.handoff.open(self.n_keys, peer, prompt_len, stream), stream

    def say(self, export: Export, **message: object) -> None:
        self.handoff.receive(export, prefill_pb2.PrefillRequest(**message))  # type: ignore[arg-type]

    def send_destination(self, export: Export, transfer_id: int = 77, **fields: object) -> None:
        destination = prefill_pb2.Destination(
            transfer_id=transfer_id,
            nonce=5,
            generation=1,
            pages=range(-(-export.prompt_len // P)),
            state_slot=1,
            lease_s=30.0,
        )
        for name, value in fields.items():
            if isinstance(value, list):
                destination.ClearField(name)  # type: ignore[arg-type]
                getattr(destination, name).extend(value)
            else:
                setattr(destination, name, value)
        self.say(export, destination=destination)

    def compute(self) -> None:
        while run_step(self.scheduler, self.handoff):
            pass

    def send_all(self, transfer_id: int = 77) -> None:
        for rank in range(self.movers.n_ranks):
            self.movers.send(rank, transfer_id)

    def quiet_all(self, transfer_id: int = 77) -> None:
        for rank in range(self.movers.n_ranks):
            self.movers.become_quiet(rank, transfer_id)

    def wait(self, seconds: float) -> None:
        """Let time pass in small steps, as the driver does."""
        until = self.clock.now_s + seconds
        while self.clock.now_s < until:
            self.clock.now_s = min(until, self.clock.now_s + 0.25)
            self.handoff.tick()

    def quiesce(
        self, *transfer_ids: int, instance: str = "prefill-1", caller: str = "d1"
    ) -> list[int]:
        request = prefill_pb2.QuiesceRequest(
            instance_id=caller, prefill_instance_id=instance, transfer_ids=transfer_ids
        )
        return list(self.handoff.quiesce(request))

    @property
    def is_at_baseline(self) -> bool:
        pages, slots = self.scheduler.page_counts(), self.scheduler.slot_counts()
        return pages.free == N_PAGES and slots.free == N_SLOTS and self.scheduler.n_open == 0


def copies(world: World, rank: int) -> list[plan_pb2.CopyPages]:
    return [c.copy for r, c in world.movers.commands if r == rank and c.HasField("copy")]
