"""The step around K3's layers at reduced depth (`stand_in.py`): row table, tables, acceptance, as a rank runs it."""

from __future__ import annotations

import torch
from stand_in import PAGE

from decode_svc.ledger import Ledger
from decode_svc.rank.graphs import GraphRunner
from decode_svc.rank.rows import RowTable
from decode_svc.rank.step import VerifyStep
from k3.cache.layout import build_layout
from k3.cache.storage import Storage
from k3.device import Device
from k3.model.k3 import Stage
from k3.parallel.mesh import SOLO
from k3.rpc.convert import sampling_to_proto, stop_to_proto
from k3.types import SamplingParams, StopParams
from k3.v1 import plan_pb2

ROOM = 4096  # tokens a request may grow by


def mix_step(
    stage: Stage,
    device: Device,
    runner: GraphRunner,
    n_rows: int,
    length: int,
    group: int,
    sampling: SamplingParams,
) -> VerifyStep:
    """A step of `n_rows` requests that hold `length` tokens, groups of `group`; rows are 1..n_rows.

    Caches hold small noise, so that nothing is multiplied by zero.
    """
    room = length + ROOM
    width = -(-room // PAGE)
    layout = build_layout(
        stage.spec,
        SOLO.mesh,
        0,
        page_tokens=PAGE,
        dtype="bfloat16",
        columns=1,
        records=group if group > 1 else 0,
    )
    storage = Storage(layout, n_rows * width, n_rows + 1, device.torch_device)
    for pool in storage.pools.values():
        pool.normal_(std=0.1)
    table = RowTable(n_rows, width, group - 1, stage.spec.vocab_size, device.torch_device)
    pages = torch.randperm(n_rows * width).view(n_rows, width).tolist()
    for row in range(1, n_rows + 1):
        table.open(
            plan_pb2.OpenRow(
                row=row,
                epoch=1,
                base=length,
                anchor=row,
                draft_len=group - 1,
                pages=pages[row - 1],
                state_slot=row,
                sampling=sampling_to_proto(sampling),
                stop=stop_to_proto(StopParams(room)),
            )
        )
    return VerifyStep(
        stage,
        storage.caches(),
        table,
        Ledger(PAGE),
        runner,
        device,
        max_rows=n_rows,
        group=group,
        depth=2,
    )
