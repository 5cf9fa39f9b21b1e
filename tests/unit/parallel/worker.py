"""One gloo rank of `test_collectives.py`: runs a scenario and prints its result as one JSON line.

Run as `python -m tests.unit.parallel.worker SCENARIO RANK PP TP CP PORT FD torch|shared`;
rank 0 inherits the socket that listens at PORT as FD.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from k3.errors import GroupFailed
from k3.model.registry import open_stage
from k3.parallel.collectives import Groups, as_is, join, leave
from k3.parallel.frame import receive_frame, send_frame
from k3.parallel.mesh import Mesh, Place
from k3.parallel.shared_memory import SLOT_BYTES, SharedMemoryCollectives, share
from tests.model_runner import CPU, OPS, Pools

NANO = Path(__file__).parents[2] / "golden/k3"
IDS = [5, 400, 3, 77, 12, 9, 300, 1, 2, 3, 5]


def operations(place: Place, groups: Groups) -> object:
    """Every collective once, on tensors that name their rank."""
    comm, r = groups.shard, float(groups.shard.rank)
    pieces = torch.tensor([[10 * r + j] for j in range(comm.size)])
    result = {
        "all_reduce": comm.all_reduce(torch.tensor([r + 1, 2.0])).tolist(),
        "strided": comm.all_reduce(torch.full((2, 2), r).t()[:, :1]).tolist(),
        "all_gather": comm.all_gather(torch.tensor([[r]]), 1).tolist(),
        "all_to_all": comm.all_to_all(pieces).flatten().tolist(),
        "bytes": comm.all_to_all(pieces.to(torch.uint8)).flatten().tolist(),
        "broadcast": comm.broadcast(torch.tensor([r + 7]), 1).tolist(),
    }
    to = (comm.rank + 1) % comm.size
    sending = comm.send(torch.tensor([r]), to)
    result["received"] = comm.recv(torch.empty(1), (comm.rank - 1) % comm.size).tolist()
    sending.wait()
    comm.barrier()
    return result


def pipeline(place: Place, groups: Groups) -> object:
    """A prompt and one decode step through all stages; the last answers with its logits."""
    stage = open_stage(NANO, place, groups, OPS, dtype="float64", device=CPU, taps=(1, 4, 8))
    pools = Pools(stage, 1, 16)
    request = pools.requests[0]
    rows: list[list[float]] = []
    for step, ids in enumerate((IDS[:-1], IDS[-1:])):
        batch = (
            pools.chunk_batch([(request, ids)])
            if step == 0
            else pools.verify_batch([(request, ids)])
        )
        frame = None
        if not place.is_first:
            frame = receive_frame(
                groups.pipeline,
                stage.in_layout,
                len(ids),
                step,
                place.previous,
                torch.float64,
                CPU,
            )
        out = stage.forward(frame, pools.caches, batch).frame
        if place.is_last:
            rows += stage.logits(stage.hidden(out)).tolist()
        else:
            send_frame(groups.pipeline, out, step, place.next).wait()
        request.length += len(ids)
    return rows


def lost(place: Place, groups: Groups) -> object:
    """Rank 1 leaves without a word; rank 0 waits for it and must get our error within the deadline."""
    if place.rank == 1:
        return "gone"
    try:
        groups.shard.recv(torch.empty(1), 1)
    except GroupFailed as error:
        return str(error)
    return "no error"


def messages(place: Place, groups: Groups) -> object:
    """Sums of whole numbers in float64, exact in any order, and digests of everything moved; sizes around a slot's."""
    comm = groups.context
    own = torch.Generator().manual_seed(comm.rank)
    sums: list[float] = []
    moved: list[str] = []
    for n in (1, 5, SLOT_BYTES // 8 - 1, SLOT_BYTES // 8, SLOT_BYTES // 8 + 1, 200_003, 0, 7):
        values = torch.randint(0, 1 << 20, (n,), generator=own).double()
        sums += [comm.all_reduce(values.clone()).sum().item() for _ in range(3)]
        pieces = torch.randint(0, 255, (comm.size, n, 3), generator=own, dtype=torch.uint8)
        for got in (
            comm.all_to_all(pieces),
            comm.all_gather(pieces, 1),
            comm.broadcast(pieces[:, : n // 2].clone(), n % comm.size),
            comm.broadcast(pieces.transpose(0, 1).clone().transpose(0, 1), 1),
        ):
            moved.append(hashlib.sha256(got.contiguous().numpy().tobytes()).hexdigest())
        comm.barrier()
    return sums, moved


def lost_sum(place: Place, groups: Groups) -> object:
    """Rank 1 ends; rank 0 must notice well within the deadline."""
    groups.shard.barrier()
    if place.rank == 1:
        return "gone"
    try:
        groups.shard.all_reduce(torch.ones(3))
    except GroupFailed as error:
        return str(error)
    return "no error"


def late_sum(place: Place, groups: Groups) -> object:
    """Rank 1 lives but does not come; the deadline of two seconds passes."""
    if place.rank == 1:
        groups.pipeline.recv(torch.empty(1), 0)
        return "late"
    assert isinstance(groups.shard, SharedMemoryCollectives)
    groups.shard._deadline_s = 2.0
    try:
        groups.shard.all_reduce(torch.ones(3))
    except GroupFailed as error:
        groups.pipeline.send(torch.ones(1), 1).wait()
        return str(error)
    return "no error"


def left_behind(place: Place, groups: Groups) -> object:
    """Names under which the file system still knows the segment of this process's group."""
    groups.shard.barrier()
    held = [line for line in Path("/proc/self/maps").read_text().splitlines() if "k3-coll" in line]
    assert held
    return [line for line in held if not line.endswith("(deleted)")]


SCENARIOS: dict[str, Callable[[Place, Groups], object]] = {
    "operations": operations,
    "pipeline": pipeline,
    "lost": lost,
    "messages": messages,
    "lost sum": lost_sum,
    "late sum": late_sum,
    "left behind": left_behind,
}


def main() -> None:
    """Join, run, print, leave."""
    scenario, *numbers, how = sys.argv[1:]
    rank, pp, tp, cp, port, listener = map(int, numbers)
    torch.set_num_threads(1)
    place = Mesh(pp, tp, cp).place(rank)
    deadline_s = 20.0 if scenario in ("lost", "lost sum") else 60.0
    wrap = (
        partial(share, deadline_s=deadline_s, n_neighbors=pp * tp * cp)
        if how == "shared"
        else as_is
    )
    groups = join(place, "127.0.0.1", port, "gloo", deadline_s, wrap=wrap, listener=listener)
    print(json.dumps(SCENARIOS[scenario](place, groups)), flush=True)  # noqa: T201
    leave()


if __name__ == "__main__":
    main()
