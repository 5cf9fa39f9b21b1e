"""One gloo rank of `test_collectives.py`: runs a scenario and prints its result as one JSON line.

Run as `python -m tests.unit.parallel.worker SCENARIO RANK PP TP CP PORT`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from k3.errors import GroupFailed
from k3.model.registry import open_stage
from k3.parallel.collectives import Groups, join, leave
from k3.parallel.frame import receive_frame, send_frame
from k3.parallel.mesh import Mesh, Place
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


SCENARIOS: dict[str, Callable[[Place, Groups], object]] = {
    "operations": operations,
    "pipeline": pipeline,
    "lost": lost,
}


def main() -> None:
    """Join, run, print, leave."""
    scenario, *numbers = sys.argv[1:]
    rank, pp, tp, cp, port = map(int, numbers)
    torch.set_num_threads(1)
    place = Mesh(pp, tp, cp).place(rank)
    groups = join(place, "127.0.0.1", port, "gloo", 20.0 if scenario == "lost" else 60.0)
    print(json.dumps(SCENARIOS[scenario](place, groups)), flush=True)  # noqa: T201
    leave()


if __name__ == "__main__":
    main()
