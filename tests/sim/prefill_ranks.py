"""Scripted movers for the handoff: they obey commands the way real ones do, but only when the test says so."""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import dataclass, field

from k3.errors import K3Error
from k3.v1 import plan_pb2, prefill_pb2
from prefill_svc.core.scheduler import PrefillScheduler
from prefill_svc.peers import Identity, Peers

P = 4
N_PEER_PAGES = 64
N_PEER_SLOTS = 8
LAYOUT = json.dumps({"layers": 3, "page_tokens": P}, separators=(",", ":")).encode()
FINGERPRINT = hashlib.sha256(LAYOUT).hexdigest()


class Clock:
    """Virtual time, seconds."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Pairing:
    """Every pair fits; one writer per decode rank."""

    def check(self, peer: prefill_pb2.Geometry) -> None:
        pass

    def n_senders(self, peer: prefill_pb2.Geometry, prompt_len: int) -> list[int]:
        return [1] * (peer.pp * peer.tp * peer.cp)


class Stream:
    """What decode would read."""

    def __init__(self) -> None:
        self.responses: list[prefill_pb2.PrefillResponse] = []
        self.is_finished = False
        self.error: K3Error | None = None

    def send(self, response: prefill_pb2.PrefillResponse) -> None:
        assert not self.is_finished, "nothing is said after the end"
        self.responses.append(response)

    def finish(self, error: K3Error | None) -> None:
        assert not self.is_finished, "a stream ends once"
        self.is_finished, self.error = True, error

    def kinds(self) -> list[str | None]:
        return [response.WhichOneof("message") for response in self.responses]


@dataclass
class Outgoing:
    """One transfer at one mover."""

    pages: list[int] = field(default_factory=list)
    has_last: bool = False
    is_sent: bool = False
    is_ending: bool = False


class Movers:
    """The movers of all ranks. `report` is the handoff's `on_status`, set by the test."""

    def __init__(self, n_ranks: int) -> None:
        self.n_ranks = n_ranks
        self.commands: list[tuple[int, plan_pb2.TransferCommand]] = []
        self.transfers: list[dict[int, Outgoing]] = [{} for _ in range(n_ranks)]
        self.quiet: set[tuple[int, int]] = set()
        self.handoff_status = lambda rank, status: None

    def command(self, rank: int, command: plan_pb2.TransferCommand) -> None:
        self.commands.append((rank, command))
        known = self.transfers[rank]
        match command.WhichOneof("command"):
            case "start":
                assert command.start.transfer_id not in known, "started twice"
                known[command.start.transfer_id] = Outgoing()
            case "copy":
                outgoing = known[command.copy.transfer_id]
                assert not outgoing.has_last, "pages after the last"
                assert command.copy.first_page == len(outgoing.pages), "in order, without gaps"
                outgoing.pages += command.copy.pages
                outgoing.has_last = command.copy.last
            case "abort":
                known.setdefault(command.abort.transfer_id, Outgoing()).is_ending = True
            case _:
                pass

    def can_send(self) -> list[tuple[int, int]]:
        return self._those(lambda o: o.has_last and not o.is_sent and not o.is_ending)

    def can_fail(self) -> list[tuple[int, int]]:
        return self._those(lambda o: not o.is_sent and not o.is_ending)

    def can_quiet(self) -> list[tuple[int, int]]:
        return self._those(lambda o: o.is_ending)

    def _those(self, wanted) -> list[tuple[int, int]]:
        return [(r, i) for r, known in enumerate(self.transfers) for i in known if wanted(known[i])]

    def send(self, rank: int, transfer_id: int) -> None:
        outgoing = self.transfers[rank][transfer_id]
        outgoing.is_sent = True
        totals = [prefill_pb2.RecordTotal(sender=rank, receiver=0, records=1)]
        n_bytes = {"latent": 10 * len(outgoing.pages)}
        sent = plan_pb2.TransferSent(transfer_id=transfer_id, totals=totals, bytes=n_bytes)
        self.handoff_status(rank, plan_pb2.TransferStatus(sent=sent))

    def fail(self, rank: int, transfer_id: int, *, peer_lost: bool = False) -> None:
        self.transfers[rank][transfer_id].is_ending = True
        failed = plan_pb2.TransferFailed(
            transfer_id=transfer_id, reason="stalled", message="scripted", peer_lost=peer_lost
        )
        self.handoff_status(rank, plan_pb2.TransferStatus(failed=failed))

    def become_quiet(self, rank: int, transfer_id: int) -> None:
        del self.transfers[rank][transfer_id]
        self.quiet.add((rank, transfer_id))
        quiet = plan_pb2.TransferQuiet(transfer_id=transfer_id)
        self.handoff_status(rank, plan_pb2.TransferStatus(quiet=quiet))

    def is_quiet(self, transfer_id: int) -> bool:
        return all((rank, transfer_id) in self.quiet for rank in range(self.n_ranks))


def identity(instance_id: str = "prefill-1") -> Identity:
    return Identity(
        instance_id=instance_id,
        layout=LAYOUT,
        layout_fingerprint=FINGERPRINT,
        draft_fingerprint="",
        nixl_version="1.5.1",
        geometry=prefill_pb2.Geometry(pp=1, tp=1, cp=1),
    )


def connect_request(
    instance_id: str, *, cp: int = 1, agents: str = "a"
) -> prefill_pb2.ConnectRequest:
    geometry = prefill_pb2.Geometry(
        pp=1, tp=1, cp=cp, n_pages=N_PEER_PAGES, n_slots=N_PEER_SLOTS, slot_columns=1
    )
    return prefill_pb2.ConnectRequest(
        proto_version=1,
        instance_id=instance_id,
        layout=LAYOUT,
        layout_fingerprint=FINGERPRINT,
        nixl_version="1.5.1",
        geometry=geometry,
        ranks=[
            prefill_pb2.RankEndpoint(
                rank=rank, agent_name=f"{instance_id}-{agents}{rank}", agent_metadata=b"secret"
            )
            for rank in range(cp)
        ],
    )


async def connect(peers: Peers, movers: Movers, request: prefill_pb2.ConnectRequest) -> None:
    """Introduce a peer; every rank answers well."""
    task = asyncio.create_task(peers.connect(request))
    await asyncio.sleep(0)
    for rank, command in list(movers.commands):
        if command.HasField("connect_peer"):
            answer = plan_pb2.PeerConnected(peer_id=command.connect_peer.peer_id)
            peers.on_connected(rank, answer)
    await task


def run_step(scheduler: PrefillScheduler, handoff) -> bool:
    """Plan one step and acknowledge it at once; returns whether there was one."""
    plan = scheduler.plan(0.0)
    if plan is None:
        return False
    handoff.planned(plan.step_id, plan.chunks)
    acknowledge(scheduler, handoff, plan)
    return True


def acknowledge(scheduler: PrefillScheduler, handoff, plan) -> None:
    finals = [(c.key, c.epoch) for c in plan.chunks if c.is_final]
    for chunk in scheduler.advance(plan.step_id, finals):
        handoff.computed(chunk.key, chunk.end)
        if chunk.is_final:
            handoff.prefilled(chunk.key, prefill_pb2.Prefilled(prompt_tokens=chunk.end))
