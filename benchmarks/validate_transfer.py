"""Part `transfer` of validate.py: every device writes to every other one at once, as services do, and the exposed tail.

A process and an agent for each device. Its pool is cut as in `transfer.py`; prepared lists, a few handles in flight per
pair, a record behind each handle. `rate`: bytes that leave a device over the time from the common start until every
record it expects has arrived. `tail`: a prompt's pages leave chunk by chunk, a chunk every `CHUNK_S`; the time from the
last chunk until its last record has arrived, beside what its bytes take at that rate.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from math import ceil
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch
from transfer import CASES, DEADLINE_S, IN_FLIGHT, Case, handles, stripes
from validate_ranks import end_with_parent

from k3.errors import K3Error
from k3.transfer.agent import Handle, Region
from k3.transfer.nixl import NIXL_VERSION, NixlAgent

Say = Callable[[str], None]
ROUNDS = 3
EMPTY = -1
CHUNKS, CHUNK_S = 8, 0.02
END_S = 10.0  # of all processes
RECORD = b"r" * 32
KINDS = {"cpu": "DRAM", "cuda": "VRAM"}


@dataclass(frozen=True, slots=True)
class Rate:
    """One case, all pairs at once. GB/s that left the slowest and the mean device; late: seconds of the last chunk."""

    case: str
    n_devices: int
    n_bytes: int  # from one device to another
    slowest: float
    mean: float
    tail_s: float
    tail_floor_s: float
    bar: float
    right: bool


class Order(NamedTuple):
    """What a process does next, together with all others.

    seed: of the pieces' order. n_chunks: 1 = all at once, 0 = see whether everything arrived.
    """

    case: Case
    seed: int
    n_chunks: int


class Sender:
    """A device's agent, connected to all others."""

    def __init__(
        self, gpu: int, n_devices: int, device: str, n_bytes: int, pipe: Connection
    ) -> None:
        """Tells the parent its pool and learns those of the others."""
        at = torch.device(device, gpu) if device == "cuda" else torch.device("cpu")
        if device == "cuda":
            torch.zeros(1, device=at)
        self._words = torch.full((n_bytes // 8,), EMPTY, dtype=torch.int64, device=at)
        self._agent = NixlAgent(f"device-{gpu}", is_batched=device == "cuda")
        words = self._words
        index = gpu if device == "cuda" else 0
        self._region = Region("pool", words.data_ptr(), index, KINDS[device], 8, words.numel())
        self._agent.register([self._region])
        self._share = (
            n_bytes // n_devices // 8 * 8
        )  # of the receiver's pool, so that senders do not meet
        self._shares = self._words[: n_devices * (self._share // 8)].view(n_devices, -1)
        self._shares[gpu] = gpu  # what leaves; every other share is a sender's
        self._gpu, self._pipe = gpu, pipe
        pipe.send((self._agent.name, self._agent.metadata(), self._region))
        self._peers: dict[int, tuple[str, Region]] = {}
        for other, (name, metadata, region) in pipe.recv().items():
            self._agent.connect(name, metadata)
            self._peers[other] = (name, region)

    def serve(self) -> None:
        """Obey until there is no order."""
        while (order := self._pipe.recv()) is not None:
            if not order.n_chunks:
                self._pipe.send(self._check(order.case))
                continue
            lists = {peer: self._lists(peer, order.case) for peer in self._peers}
            n = self._share // order.case.piece
            work = {peer: list(handles(order.case, n, order.seed)) for peer in self._peers}
            expected = len(next(iter(work.values()))) * len(self._peers)
            self._pipe.send("ready")
            self._pipe.recv()
            self._pipe.send(self._write(lists, work, expected, order.n_chunks))
        self._agent.close()

    def _lists(self, peer: int, case: Case) -> int:
        """Our share of our pool to our share of the peer's."""
        name, region = self._peers[peer]
        ours, theirs = self._part(self._region), self._part(region)
        return self._agent.prepare(name, stripes(ours, case.piece), stripes(theirs, case.piece))

    def _part(self, region: Region) -> Region:
        base = region.base + self._gpu * self._share
        return Region(region.name, base, region.device, region.memory, 8, self._share // 8)

    def _check(self, case: Case) -> bool:
        """Whether every piece of every sender arrived; forgets them."""
        n_words = self._share // case.piece * case.piece // 8
        right = all(bool((self._shares[j, :n_words] == j).all()) for j in self._peers)
        for j in self._peers:
            self._shares[j] = EMPTY
        if self._words.is_cuda:
            self._shares.sum().item()  # cleared before others write again
        return right

    def _write(
        self,
        lists: dict[int, int],
        work: dict[int, list[tuple[np.ndarray, np.ndarray]]],
        expected: int,
        n_chunks: int,
    ) -> tuple[float, float]:
        """Seconds until all that is expected arrived: from the start, and from the last chunk on."""
        started = time.perf_counter()
        end = started + DEADLINE_S
        live: dict[int, list[Handle]] = {peer: [] for peer in work}
        per_chunk = {peer: ceil(len(todo) / n_chunks) for peer, todo in work.items()}
        n_seen, last = 0, started + (n_chunks - 1) * CHUNK_S
        while n_seen < expected or any(live.values()) or any(work.values()):
            now = time.perf_counter()
            n_open = min(n_chunks, 1 + int((now - started) / CHUNK_S))
            for peer, todo in work.items():
                left = per_chunk[peer] * (n_chunks - n_open)  # not computed yet
                while len(todo) > left and len(live[peer]) < IN_FLIGHT:
                    live[peer].append(self._agent.write(lists[peer], *todo.pop(), RECORD))  # type: ignore[arg-type]
                live[peer] = [handle for handle in live[peer] if not self._agent.poll(handle)]
            n_seen += len(self._agent.notes())
            if now > end:
                raise SystemExit(f"{n_seen} of {expected} records came in {DEADLINE_S:g} s")
        now = time.perf_counter()
        return now - started, now - last


def serve(gpu: int, n_devices: int, device: str, n_bytes: int, pipe: Connection) -> None:
    """A process."""
    end_with_parent()
    Sender(gpu, n_devices, device, n_bytes, pipe).serve()


class Senders:
    """All processes, in step."""

    def __init__(self, device: str, n_devices: int, n_bytes: int) -> None:
        """n_bytes: of each pool. Raises K3Error when a process does not start."""
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for gpu in range(n_devices):
            here, there = context.Pipe()
            arguments = (gpu, n_devices, device, n_bytes, there)
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        known = dict(enumerate(self._answers()))
        for gpu, pipe in enumerate(self._pipes):
            pipe.send({other: known[other] for other in known if other != gpu})

    def are_right(self, case: Case) -> bool:
        """Whether all bytes of the last order arrived."""
        for pipe in self._pipes:
            pipe.send(Order(case, 0, 0))
        return all(self._answers())

    def do(self, order: Order) -> list[tuple[float, float]]:
        """The times of all."""
        for pipe in self._pipes:
            pipe.send(order)
        self._answers()
        for pipe in self._pipes:
            pipe.send("go")
        return self._answers()

    def _answers(self) -> list[Any]:
        found: list[Any] = []
        for gpu, pipe in enumerate(self._pipes):
            try:
                if not pipe.poll(DEADLINE_S):
                    raise K3Error(f"device {gpu} said nothing for {DEADLINE_S:g} s")
                found.append(pipe.recv())
            except EOFError as error:
                raise K3Error(f"the process of device {gpu} ended; see above") from error
        return found

    def close(self) -> None:
        """End all; who has not ended in `END_S` is killed."""
        for pipe in self._pipes:
            with suppress(OSError):  # it ended before
                pipe.send(None)
        end = time.monotonic() + END_S
        for process in self._processes:
            process.join(max(0.0, end - time.monotonic()))
            process.kill()
            process.join(END_S)


def rates(device: str, n_devices: int, n_bytes: int) -> Iterator[Rate]:
    """Every case that is not only there to be slow."""
    with closing(Senders(device, n_devices, n_bytes)) as senders:
        for case in CASES:
            n = n_bytes // n_devices // case.piece
            if not case.bar or not n:
                continue
            sent = (n_devices - 1) * n * case.piece
            whole = [senders.do(Order(case, seed, 1)) for seed in range(1 + ROUNDS)][1:]
            spans = [statistics.median(times) for times in zip(*_first(whole), strict=True)]
            late = [senders.do(Order(case, seed, CHUNKS)) for seed in range(ROUNDS)]
            tail_s = max(statistics.median(times) for times in zip(*_second(late), strict=True))
            slowest, mean = sent / max(spans) / 1e9, sent / statistics.mean(spans) / 1e9
            last = ceil(ceil(n / case.per_handle) / CHUNKS) * case.per_handle
            floor_s = (n_devices - 1) * min(n, last) * case.piece / (slowest * 1e9)
            yield Rate(
                case.name,
                n_devices,
                n * case.piece,
                slowest,
                mean,
                tail_s,
                floor_s,
                case.bar,
                senders.are_right(case),
            )


def _first(rounds: list[list[tuple[float, float]]]) -> list[list[float]]:
    return [[whole for whole, _ in times] for times in rounds]


def _second(rounds: list[list[tuple[float, float]]]) -> list[list[float]]:
    return [[late for _, late in times] for times in rounds]


def measure(
    device: str, n_devices: int, n_bytes: int, say: Say, keep: Callable[[Any], None]
) -> None:
    """All cases; `keep` gets the part's tree after each."""
    found: list[dict[str, Any]] = []
    for rate in rates(device, n_devices, n_bytes):
        say(f"transfer: {rate.case}: {rate.slowest:.1f} GB/s, tail {1e3 * rate.tail_s:.2f} ms")
        found.append(asdict(rate))
        keep({"nixl": NIXL_VERSION, "rates": found})


def lines(part: dict[str, Any]) -> list[str]:
    """Markdown."""
    out = [
        f"nixl {part['nixl']}. Every device writes to every other one at the same time; GB/s that leave a device. "
        f"Tail: from the last of {CHUNKS} chunks, one every {1e3 * CHUNK_S:.0f} ms, until all of it has arrived.",
        "",
        "| what | devices | MB to each | GB/s, slowest | mean | bar | tail ms | its bytes at that rate | ratio "
        "| bytes right |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    for rate in (Rate(**r) for r in part["rates"]):
        out.append(
            f"| {rate.case} | {rate.n_devices} | {rate.n_bytes / 1e6:.0f} | {rate.slowest:.1f} | {rate.mean:.1f} | "
            f"{rate.bar:g} | {1e3 * rate.tail_s:.2f} | {1e3 * rate.tail_floor_s:.2f} | "
            f"{rate.tail_s / rate.tail_floor_s:.2f} | {'yes' if rate.right else 'NO'} |"
        )
    return out


def problems(part: dict[str, Any]) -> list[str]:
    """Bytes that did not arrive."""
    return [f"bytes are wrong: {r['case']}" for r in part["rates"] if not r["right"]]
