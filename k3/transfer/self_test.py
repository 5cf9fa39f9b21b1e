"""Start-up self-test: how fast this process writes into another one, with the agent and the transports it will use.

A child on the same device takes the bytes into memory of its own. Where UCX may not use what makes a host fast
(CUDA IPC, cross-memory attach), everything falls back to TCP without a word, hundreds of times slower: this is how it
shows. What lies between two hosts is not measured. `python -m k3.transfer.self_test` is the child; it lives until its
stdin closes, as it does when its parent ends.
"""

from __future__ import annotations

import argparse
import base64
import json
import logging
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict

import numpy as np
import torch

from k3.errors import TransferError
from k3.transfer.agent import Lists, Region, Stripes, TransferAgent
from k3.transfer.nixl import NixlAgent
from k3.v1 import plan_pb2

log = logging.getLogger("k3.transfer")

BYTES = 64 << 20  # of one write, or all of a smaller pool
ROUNDS, ROUNDS_S = 8, 2.0  # so many writes, fewer when they take longer
START_S = 60.0  # of the child: imports, and a context on its GPU
WRITE_S = 10.0  # one write; slower is as good as nothing
PAUSE_S = 50e-6


def measure(
    pools: Sequence[Region], floor: float, recording: AbstractContextManager[object]
) -> plan_pb2.SelfTest:
    """Write the largest pool's first bytes to a child, several times; over within START_S and two writes.

    The agent is one of its own: nothing of the test can be left over in the one that serves. One piece, no batch.
    recording: `Device.recording`, held while the agent is used and not while the child starts or between writes.
    """
    try:
        pool = max(pools, key=lambda region: region.n_bytes)
        with _peer(pool) as (name, metadata, target), _sender(pool, recording) as agent:
            with recording:
                agent.connect(name, metadata)
                lists = agent.prepare(
                    name, _whole(pool, target.n_bytes), _whole(target, target.n_bytes)
                )
            rate = target.n_bytes / _fastest_s(agent, lists, recording)
    except (TransferError, OSError, ValueError) as error:
        return plan_pb2.SelfTest(problem=_advice(f"failed: {error}", floor))
    log.info(
        "transfer self-test: %.3g GB/s, %d bytes of %s", rate / 1e9, target.n_bytes, pool.memory
    )
    is_enough = rate >= 1e9 * floor
    problem = "" if is_enough else _advice(f"reached {rate / 1e9:.3g} GB/s", floor)
    return plan_pb2.SelfTest(bytes_per_s=rate, problem=problem)


def _advice(found: str, floor: float) -> str:
    return (
        f"writing to another process of this host {found}; transfer.min_bandwidth={floor:g} GB/s is wanted. Let UCX "
        "use CUDA IPC or cross-memory attach (UCX_TLS; containers must share PID and IPC namespaces for it), or lower "
        "transfer.min_bandwidth"
    )


@contextmanager
def _sender(pool: Region, recording: AbstractContextManager[object]) -> Iterator[TransferAgent]:
    with recording:
        agent = NixlAgent("self-test")
    try:
        with recording:
            agent.register([pool])
        yield agent
    finally:
        with recording:
            agent.close()


def _fastest_s(
    agent: TransferAgent, lists: Lists, recording: AbstractContextManager[object]
) -> float:
    """Seconds of the fastest write; the first one pays for the wire-up."""
    spans: list[float] = []
    while len(spans) < ROUNDS and sum(spans) < ROUNDS_S:
        with recording:
            spans.append(_write_s(agent, lists))
    return min(spans)


def _write_s(agent: TransferAgent, lists: Lists) -> float:
    only = np.zeros(1, np.int32)
    started = time.perf_counter()
    handle = agent.write(lists, only, only, bytes(32))
    while not agent.poll(handle):
        if time.perf_counter() - started > WRITE_S:
            raise TransferError(f"a write did not end within {WRITE_S:g} s")
        time.sleep(PAUSE_S)
    return time.perf_counter() - started


def _whole(region: Region, n_bytes: int) -> Stripes:
    """The first bytes of a pool as one piece."""
    return Stripes(region.memory, region.device, (region.base,), n_bytes, n_bytes, 1)


@contextmanager
def _peer(pool: Region) -> Iterator[tuple[str, bytes, Region]]:
    """A child with as much memory; its agent's name, metadata and pool. Raises TransferError when it does not start."""
    reads, writes = os.pipe()
    words = ("--memory", pool.memory, "--device", str(pool.device), "--fd", str(writes))
    words += ("--bytes", str(min(BYTES, pool.n_bytes)))
    with os.fdopen(reads, "rb") as answers:
        try:
            child = subprocess.Popen(
                [sys.executable, "-m", "k3.transfer.self_test", *words],
                stdin=subprocess.PIPE,
                pass_fds=(writes,),
            )
        finally:
            os.close(writes)
        try:
            line = _line(answers.fileno(), time.monotonic() + START_S)
            if not line:
                code = child.wait(START_S)
                raise TransferError(f"the other process ended with code {code}")
        except BaseException:
            child.kill()
            child.communicate()
            raise
    try:
        found = json.loads(line)
        yield found["name"], base64.b64decode(found["metadata"]), Region(**found["region"])
    finally:
        child.kill()
        child.communicate()


def _line(fd: int, deadline: float) -> bytes:
    """What comes until a line is whole; nothing when the other end closes. Raises TransferError at the deadline."""
    found = b""
    while not found.endswith(b"\n"):
        if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TransferError(f"the other process was not there within {START_S:g} s")
        piece = os.read(fd, 1 << 16)
        if not piece:
            return b""
        found += piece
    return found


def main() -> None:
    """The child: an agent with one pool, told to the parent, then silence."""
    parser = argparse.ArgumentParser(prog="k3.transfer.self_test")
    parser.add_argument("--memory", required=True, choices=("DRAM", "VRAM"))
    parser.add_argument("--device", required=True, type=int)
    parser.add_argument("--bytes", required=True, type=int)
    parser.add_argument("--fd", required=True, type=int)
    arguments = parser.parse_args()
    where = "cpu" if arguments.memory == "DRAM" else f"cuda:{arguments.device}"
    memory = torch.zeros(arguments.bytes, dtype=torch.uint8, device=where)
    memory[-1].item()  # written, and on a GPU its context is this thread's
    agent = NixlAgent("self-test-peer")
    region = Region(
        "self-test",
        memory.data_ptr(),
        arguments.device,
        arguments.memory,
        arguments.bytes,
        1,
    )
    agent.register([region])
    metadata = base64.b64encode(agent.metadata()).decode()
    answer = {"name": agent.name, "metadata": metadata, "region": asdict(region)}
    with os.fdopen(arguments.fd, "w") as parent:
        parent.write(json.dumps(answer) + "\n")
    sys.stdin.read()
    agent.close()


if __name__ == "__main__":
    main()
