"""Two real processes and real NIXL: bytes arrive resharded, and every kind of death or stall ends in a proof of quiet.

Each test runs with UCX's own choice of transports (on one host: copies by CMA) and over TCP alone.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator

import pytest

from k3.config.tree import TransferConfig
from k3.transfer.plan import Sharding, expected_senders
from k3.v1 import plan_pb2, prefill_pb2
from tests.e2e.transfer_host import Remote
from tests.resharding import PAGE_TOKENS, make_spec, sharding

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

KINDS, HEADS = "kmkmk", 8
N = len(KINDS)
LEN = 33
SOURCES = [8, 1, 0, 3, 4, 2, 6, 7, 5]
TARGETS = [3, 4, 1, 8, 2, 0, 7, 5, 6]
SHAPES = [
    (sharding(N), sharding(N, columns=3)),
    (sharding(N, pp=2), sharding(N, cp=2)),
    (sharding(N, tp=4), sharding(N, pp=2)),
]
QUICK = TransferConfig(handle_deadline_s=2.0, drain_s=1.5)


class Crew:
    """Hosts of one transport; those that outlive a test serve the next one: starting them is what takes time."""

    def __init__(self, transport: str) -> None:
        self.transport = transport
        self.idle: list[Remote] = []
        self.busy: list[Remote] = []

    def take(self) -> Remote:
        host = self.idle.pop() if self.idle else Remote()
        self.busy.append(host)
        return host

    def rest(self) -> None:
        for host in self.busy:
            if host.process.is_alive():
                self.idle.append(host)
            else:
                host.end()
        self.busy.clear()

    def end(self) -> None:
        self.rest()
        for host in self.idle:
            host.end()


@pytest.fixture(scope="module", params=["default", "tcp"])
def crew(request: pytest.FixtureRequest) -> Iterator[Crew]:
    """Hosts inherit the environment of the moment they start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("NIXL_LOG_LEVEL", "WARN")
        patch.setenv("UCX_TCP_USER_TIMEOUT", "5s")
        if request.param == "tcp":
            patch.setenv("UCX_TLS", "self,tcp")
            patch.setenv("UCX_NET_DEVICES", "lo")
        else:
            patch.delenv("UCX_TLS", raising=False)
        crew = Crew(request.param)
        yield crew
        crew.end()


@pytest.fixture
def hosts(crew: Crew) -> Iterator[tuple[Remote, Remote]]:
    """(sender, receiver)."""
    yield crew.take(), crew.take()
    crew.rest()


def expect(receiver: Remote, prefill: Sharding, transfer_id: int) -> None:
    for rank in range(receiver.side.size):
        senders = expected_senders(
            make_spec(KINDS, HEADS),
            prefill,
            receiver.side,
            page_tokens=PAGE_TOKENS,
            prompt_len=LEN,
            rank=rank,
        )
        command = plan_pb2.ExpectTransfer(transfer_id=transfer_id, nonce=7, senders=senders)
        receiver.tell(rank, expect=command)


def start(sender: Remote, transfer_id: int, *, slot: int = 1) -> None:
    destination = prefill_pb2.Destination(
        transfer_id=transfer_id, nonce=7, generation=1, pages=TARGETS, state_slot=slot
    )
    command = plan_pb2.StartTransfer(
        transfer_id=transfer_id,
        nonce=7,
        peer_id="peer",
        destination=destination,
        prompt_len=LEN,
    )
    sender.tell_all(start=command)


def copy(sender: Remote, transfer_id: int, first: int, n: int, *, after_step: int = 0) -> None:
    command = plan_pb2.CopyPages(
        transfer_id=transfer_id,
        first_page=first,
        pages=SOURCES[first : first + n],
        after_step=after_step,
        last=first + n == len(SOURCES),
        state_slot=2,
        tokens=LEN,
    )
    sender.tell_all(copy=command)


def open_pair(
    sender: Remote,
    receiver: Remote,
    prefill: Sharding,
    decode: Sharding,
    config: TransferConfig,
    seed: int = 1,
) -> None:
    sender.open(KINDS, HEADS, prefill, config)
    receiver.open(KINDS, HEADS, decode, config)
    sender.connect(receiver)
    sender.order("fill", LEN, SOURCES, 2, seed)
    receiver.order("hope", LEN, TARGETS, 1, seed)


def complete(sender: Remote, receiver: Remote, transfer_id: int) -> None:
    """One whole transfer in two copies, the second behind a step."""
    n_arrived, n_sent = len(receiver.heard("arrived")), len(sender.heard("sent"))
    expect(receiver, sender.side, transfer_id)
    start(sender, transfer_id)
    copy(sender, transfer_id, 0, 4)
    copy(sender, transfer_id, 4, 5, after_step=transfer_id)
    sender.order("step_done", transfer_id)
    receiver.wait("arrived", n_arrived + receiver.side.size)
    sender.wait("sent", n_sent + sender.side.size)


def test_caches_arrive_resharded_byte_for_byte(hosts):
    sender, receiver = hosts
    for prefill, decode in SHAPES:
        open_pair(sender, receiver, prefill, decode, TransferConfig())
        complete(sender, receiver, 1)
        assert receiver.order("differing") == [], f"{prefill} -> {decode}"


def test_a_killed_receiver_ends_in_quiet_and_its_successor_is_served(crew, hosts):
    sender, receiver = hosts
    prefill, decode = SHAPES[0]
    open_pair(sender, receiver, prefill, decode, QUICK)
    start(sender, 1)
    copy(sender, 1, 0, 4)
    sender.wait("progress", 1)
    os.kill(receiver.process.pid or 0, signal.SIGKILL)
    receiver.process.join(5)
    copy(sender, 1, 4, 5)
    (failed,) = sender.wait("failed", 1)
    assert failed.peer_lost
    sender.wait("quiet", 1)
    successor = crew.take()
    successor.open(KINDS, HEADS, decode, QUICK)
    sender.connect(successor)
    successor.order("hope", LEN, TARGETS, 1, 1)
    complete(sender, successor, 2)
    assert successor.order("differing") == []


def test_a_killed_sender_leaves_every_other_byte_of_the_receiver_alone(crew, hosts):
    sender, receiver = hosts
    prefill, decode = SHAPES[0]
    open_pair(sender, receiver, prefill, decode, QUICK)
    expect(receiver, prefill, 1)
    start(sender, 1)
    copy(sender, 1, 0, 4)
    sender.wait("progress", 1)
    os.kill(sender.process.pid or 0, signal.SIGKILL)
    sender.process.join(5)
    differing = {name: units for _rank, name, units in receiver.order("differing")}
    assert set(differing["latent"]) == set(TARGETS[4:]), "only the pages that did come are as hoped"
    assert differing["conv"] == [1], "no state was sent"
    assert not receiver.heard("arrived")
    successor = crew.take()
    successor.open(KINDS, HEADS, prefill, QUICK)
    successor.connect(receiver)
    successor.order("fill", LEN, SOURCES, 2, 1)
    complete(successor, receiver, 2)
    assert receiver.order("differing") == []


def test_a_stopped_receiver_costs_a_deadline_and_late_bytes_stay_in_their_pages(crew, hosts):
    sender, receiver = hosts
    prefill, decode = SHAPES[0]
    open_pair(sender, receiver, prefill, decode, QUICK)
    pid = receiver.process.pid or 0
    os.kill(pid, signal.SIGSTOP)
    try:
        start(sender, 1)
        copy(sender, 1, 0, 9)
        if crew.transport == "tcp":
            (failed,) = sender.wait("failed", 1)
            assert failed.reason == "stalled"
        sender.tell(0, abort=plan_pb2.AbortTransfer(transfer_id=1))
        sender.wait("quiet", 1)
    finally:
        os.kill(pid, signal.SIGCONT)
    for _rank, name, units in receiver.order("differing"):
        assert set(units) <= {"latent": set(TARGETS), "kda": {3}, "conv": {1}}[name]
    sender.connect(receiver)
    complete(sender, receiver, 2)
    assert receiver.order("differing") == []


def test_a_rebuilt_receiver_gets_nothing_more_from_transfers_of_its_old_agent(hosts):
    sender, receiver = hosts
    prefill, decode = SHAPES[0]
    open_pair(sender, receiver, prefill, decode, QUICK)
    start(sender, 1)
    copy(sender, 1, 0, 4)
    sender.wait("progress", 1)
    receiver.tell_all(rebuild=plan_pb2.RebuildAgent())
    receiver.wait("ready", 2)
    copy(sender, 1, 4, 5)
    (failed,) = sender.wait("failed", 1)
    assert failed.peer_lost
    sender.wait("quiet", 1)
    differing = {name: units for _rank, name, units in receiver.order("differing")}
    assert set(differing["latent"]) == set(TARGETS[4:])
    sender.connect(receiver)
    complete(sender, receiver, 2)
    assert receiver.order("differing") == []


@pytest.fixture
def cable(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[str], list[str]]]:
    """Two network namespaces and the devices of the cable between them."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the ip command")
    spaces = [f"k3-{os.getpid()}-{side}" for side in "ab"]
    devices = [f"k3{side}{os.getpid()}" for side in "ab"]
    if subprocess.run(["ip", "netns", "add", spaces[0]], check=False).returncode:
        pytest.skip("this machine does not let us make network namespaces")
    ip("netns", "add", spaces[1])
    ip(
        "link",
        "add",
        devices[0],
        "netns",
        spaces[0],
        "type",
        "veth",
        "peer",
        devices[1],
        "netns",
        spaces[1],
    )
    for number, (space, device) in enumerate(zip(spaces, devices, strict=True), 1):
        ip("-n", space, "addr", "add", f"10.99.0.{number}/24", "dev", device)
        ip("-n", space, "link", "set", device, "up")
        ip("-n", space, "link", "set", "lo", "up")  # an agent first dials itself
    monkeypatch.setenv("UCX_TLS", "self,tcp")
    monkeypatch.setenv("UCX_TCP_USER_TIMEOUT", "5s")
    yield spaces, devices
    for space in spaces:
        ip("netns", "del", space)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def test_a_cut_cable_ends_in_quiet_and_a_mended_one_serves_again(cable):
    spaces, devices = cable
    sender, receiver = (Remote(s, d) for s, d in zip(spaces, devices, strict=True))
    try:
        prefill, decode = SHAPES[0]
        open_pair(sender, receiver, prefill, decode, QUICK)
        start(sender, 1)
        copy(sender, 1, 0, 4)
        sender.wait("progress", 1)
        lost = ("10.99.0.2", "dev", devices[0])  # frames to nobody: devices stay up, packets vanish
        ip(
            "-n",
            spaces[0],
            "neigh",
            "replace",
            *lost,
            "lladdr",
            "02:00:00:00:00:99",
            "nud",
            "permanent",
        )
        copy(sender, 1, 4, 5)
        (failed,) = sender.wait("failed", 1)
        assert failed.reason in ("stalled", "peer_lost")
        sender.wait("quiet", 1)
        ip("-n", spaces[0], "neigh", "del", *lost)
        differing = {name: units for _rank, name, units in receiver.order("differing")}
        assert set(differing["latent"]) == set(TARGETS[4:])
        sender.connect(receiver)
        complete(sender, receiver, 2)
        assert receiver.order("differing") == []
    finally:
        sender.end()
        receiver.end()
