"""Collectives over real processes, through sockets and shared memory, and sharded layers over threads."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from k3_kernels.cpu import library
from safetensors.torch import save_file
from torch import Tensor

from k3.errors import GroupFailed
from k3.model.registry import open_stage
from k3.parallel.collectives import SoloCollectives, join
from k3.parallel.mesh import SOLO, Mesh
from tests.compare import assert_close
from tests.golden.k3.twin import mxfp4_tensors
from tests.model_runner import CPU, OPS, Pools, solo_stage
from tests.thread_group import mesh_groups, run_group
from tests.unit.parallel.worker import IDS, NANO

ROOT = Path(__file__).parents[3]
DEADLINE_S = 120


def _run(scenario: str, mesh: Mesh, how: str = "torch") -> list[object]:
    """One process per rank; their answers by rank."""
    if how == "shared" and not library.is_built():
        pytest.skip("the native library is not built")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}
    with socket.create_server(
        ("127.0.0.1", 0)
    ) as store:  # rank 0 inherits it: its port stays taken
        port = store.getsockname()[1]
        numbers = [str(n) for n in (mesh.pp, mesh.tp, mesh.cp, port, store.fileno())]
        processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.unit.parallel.worker",
                    scenario,
                    str(rank),
                    *numbers,
                    how,
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env=environment,
                pass_fds=() if rank else (store.fileno(),),
            )
            for rank in range(mesh.size)
        ]
    try:
        outputs = [process.communicate(timeout=DEADLINE_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(out) for out, _ in outputs]


@pytest.mark.parametrize("how", ["torch", "shared"])
def test_every_operation(how: str) -> None:
    first, second = _run("operations", Mesh(tp=2), how)
    common = {
        "all_reduce": [3.0, 4.0],
        "strided": [[1.0], [1.0]],
        "all_gather": [[0.0, 1.0]],
        "broadcast": [8.0],
    }
    own = {"all_to_all": [0.0, 10.0], "bytes": [0, 10], "received": [1.0]}
    assert first == {**common, **own}
    own = {"all_to_all": [1.0, 11.0], "bytes": [1, 11], "received": [0.0]}
    assert second == {**common, **own}


@pytest.mark.prefill
def test_two_stages_over_gloo_equal_one() -> None:
    *_, rows = _run("pipeline", Mesh(pp=2))
    pools = Pools(solo_stage(NANO, "float64"), 1, 16)
    expected = pools.prefill(pools.requests[0], IDS, len(IDS))
    assert_close(torch.tensor(rows, dtype=torch.float64), expected, 1e-9, "logits")


@pytest.mark.helix
def test_long_and_odd_messages_through_shared_memory_are_those_of_sockets() -> None:
    mesh = Mesh(cp=3)
    shared = _run("messages", mesh, "shared")
    assert shared == _run("messages", mesh)
    assert len({json.dumps(sums) for sums, _ in shared}) == 1, "ranks differ in the bits of a sum"


def test_a_rank_that_is_gone_is_an_error_of_ours_not_a_hang() -> None:
    answer, _ = _run("lost", Mesh(tp=2))
    assert isinstance(answer, str)
    assert "receive from rank 1 failed" in answer


def test_a_rank_that_is_gone_or_late_is_an_error_through_shared_memory_too() -> None:
    gone, _ = _run("lost sum", Mesh(tp=2), "shared")
    assert "all-reduce failed: rank 1" in gone
    late, _ = _run("late sum", Mesh(tp=2), "shared")
    assert "all-reduce failed: rank 1" in late


def test_the_memory_that_ranks_share_has_no_name() -> None:
    first, second = _run("left behind", Mesh(tp=2), "shared")
    assert first == second == []


def test_a_mesh_of_one_rank_opens_no_socket() -> None:
    assert isinstance(join(SOLO, "192.0.2.1", 1, "gloo", 1.0).shard, SoloCollectives)


def test_a_group_of_one_has_nobody_to_send_to() -> None:
    with pytest.raises(GroupFailed):
        SoloCollectives().send(torch.empty(1), 1)


def _sharded(mesh: Mesh, run: str) -> list[Tensor]:
    """Logits of every rank: a prompt in two chunks, then verify groups with rejections."""
    groups = mesh_groups(mesh)

    def body(rank: int) -> Tensor:
        stage = open_stage(NANO, mesh.place(rank), groups[rank], OPS, dtype="float64", device=CPU)
        pools = Pools(stage, 1, 32, columns=3)
        request = pools.requests[0]
        rows = [pools.prefill(request, IDS[:6], 4)]
        if run == "decode":
            rows.append(pools.verify([(request, [IDS[6], IDS[7], 99])], [1])[0, :2])
            rows.append(pools.verify([(request, IDS[8:11])], [2])[0])
        return torch.cat(rows)

    return run_group(mesh.size, body)


@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_parallel_ranks_all_give_the_unsharded_logits(tp: int) -> None:
    pools = Pools(solo_stage(NANO, "float64"), 1, 32)
    expected = pools.prefill(pools.requests[0], IDS, len(IDS))
    for rank, logits in enumerate(_sharded(Mesh(tp=tp), "decode")):
        assert_close(logits, expected, 1e-9, f"tp={tp} rank {rank}")


def test_tensor_parallel_mxfp4_experts_are_split_by_id(tmp_path: Path) -> None:
    shutil.copy(NANO / "config-mxfp4.json", tmp_path / "config.json")
    save_file(mxfp4_tensors(), tmp_path / "model.safetensors")
    pools = Pools(solo_stage(tmp_path, "float64"), 1, 32)
    expected = pools.prefill(pools.requests[0], IDS, 4)
    mesh = Mesh(tp=2)
    groups = mesh_groups(mesh)

    def body(rank: int) -> Tensor:
        stage = open_stage(
            tmp_path,
            mesh.place(rank),
            groups[rank],
            OPS,
            dtype="float64",
            device=CPU,
            moe_weights=("packed", "dequant")[rank],
        )
        own = Pools(stage, 1, 32)
        return own.prefill(own.requests[0], IDS, 4)

    for rank, logits in enumerate(run_group(2, body)):
        assert_close(logits, expected, 1e-9, f"rank {rank}")
