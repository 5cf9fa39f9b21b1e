"""Context-parallel decode: pages spread over ranks by the ledger give the numbers of one rank.

The caches are filled by an unsharded prefill and dealt out the way a transfer does it: page b to
rank b mod cp, heads of the recurrent state by shard.
"""

from __future__ import annotations

import pytest
import torch
from k3_kernels.reference.tables import verify_tables
from torch import Tensor

from k3.cache.layout import build_layout
from k3.cache.storage import Storage
from k3.model.batch import VerifyBatch
from k3.model.k3 import Stage
from k3.model.registry import open_stage
from k3.parallel.mesh import Mesh, Place
from tests.compare import assert_close
from tests.model_runner import CPU, OPS, Pools, solo_stage
from tests.thread_group import mesh_groups, run_group
from tests.unit.parallel.worker import NANO

pytestmark = pytest.mark.helix

PAGE, GROUP, SLOT = 4, 3, 1


@pytest.fixture(scope="module")
def solo() -> Stage:
    return solo_stage(NANO, "float64")


def _deal(pools: Pools, place: Place, prompt: int) -> tuple[Storage, Tensor]:
    """This rank's share of a prefilled request, in fresh NaN-filled pools."""
    mesh, spec = place.mesh, pools.stage.spec
    layout = build_layout(spec, mesh, 0, page_tokens=PAGE, dtype="float64", columns=GROUP)
    request = pools.requests[0]
    own = request.pages[place.cp_rank :: mesh.cp]
    storage = Storage(layout, len(own) + 2, 2, CPU, fill_nan=True)
    table = torch.arange(len(own), 0, -1, dtype=torch.int32)  # shuffled: counting down
    content = -(-prompt // PAGE)
    for local, page in enumerate(own.tolist()):
        if local * mesh.cp + place.cp_rank < content:
            storage.pools["latent"][int(table[local])] = pools.storage.pools["latent"][page]
    heads = place.shard.of(spec.kda.n_heads)
    for name, columns in (("kda", GROUP), ("conv", 1)):
        source = pools.storage.pools[name][request.slot, heads]
        storage.pools[name][SLOT * columns] = source
    return storage, table


@pytest.mark.parametrize("mesh", [Mesh(cp=2), Mesh(cp=4), Mesh(tp=2, cp=2)], ids=str)
@pytest.mark.parametrize(
    ("prompt", "exchange"),
    [
        (1, "value"),
        (1, "gather"),
        (3, "latent"),
        (4, "gather"),
        (5, "value"),
        (5, "latent"),
        (9, "gather"),
        (31, "value"),
        (31, "latent"),
        (31, "gather"),
    ],
)
def test_verify_groups_over_context_ranks_equal_one_rank(
    solo: Stage, mesh: Mesh, prompt: int, exchange: str
) -> None:
    ids = torch.randint(0, 512, (prompt + 12,), generator=torch.Generator().manual_seed(prompt))
    pools = Pools(solo, 1, len(ids), PAGE)
    pools.prefill(pools.requests[0], ids[:prompt].tolist(), 16)
    whole = Pools(solo, 1, len(ids))
    expected = whole.prefill(whole.requests[0], ids.tolist(), len(ids))
    groups = mesh_groups(mesh)

    def body(rank: int) -> list[Tensor]:
        place = mesh.place(rank)
        stage = open_stage(
            NANO, place, groups[rank], OPS, dtype="float64", device=CPU, exchange=exchange
        )
        storage, table = _deal(pools, place, prompt)
        rows, base, column = [], prompt, 0
        for accepted in (1, 0, 2, 2):
            tokens = ids[base : base + GROUP].clone()
            tokens[accepted + 1 :] = 7
            batch = _batch(tokens, table, base, column, place)
            output = stage.forward(None, storage.caches(), batch)
            rows.append(stage.logits(stage.hidden(output.frame))[: accepted + 1])
            base, column = base + accepted + 1, accepted
        return rows

    for rank, rows in enumerate(run_group(mesh.size, body)):
        got = torch.cat(rows)
        reference = expected[prompt : prompt + len(got)]
        assert_close(got, reference, 1e-9, f"{mesh} rank {rank}, prompt of {prompt}")


def _batch(tokens: Tensor, table: Tensor, base: int, column: int, place: Place) -> VerifyBatch:
    valid = torch.ones(1, GROUP, dtype=torch.bool)
    _, slot, bound = verify_tables(
        torch.tensor([base]), table[None], valid, PAGE, place.mesh.cp, place.cp_rank
    )
    return VerifyBatch(
        token_ids_T=tokens,
        page_table_BW=table[None],
        slot_T=slot,
        bound_T=bound,
        state_slots_B=torch.tensor([SLOT]),
        read_column_B=torch.tensor([column]),
        group=GROUP,
        max_bound=int(bound.max()),
    )
