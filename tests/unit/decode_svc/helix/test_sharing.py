"""R8, R27, R30, R36, R37: which rank has which part of a model, a prompt and a state."""

import pytest
import torch

from decode_svc.ledger import Ledger
from k3.config.commandline import CommandLine
from k3.config.load import load_engine
from k3.model.k3 import Stage
from k3.model.layers import GatedMlp
from k3.model.moe import Moe
from k3.model.registry import open_stage
from k3.model.spec import K3Spec
from k3.parallel.mesh import Mesh, Shard
from k3.transfer.plan import Pair, Sharding, expected_senders, owned_pages
from tests.compare import assert_close
from tests.model_runner import CPU, OPS, solo_stage
from tests.thread_group import mesh_groups, run_group
from tests.unit.parallel.worker import NANO

pytestmark = pytest.mark.helix

SPEC = K3Spec.from_folder(NANO)


def sharding(tp: int, cp: int) -> Sharding:
    return Sharding(1, tp, cp, (0, SPEC.num_layers), 64, 8, 1)


@pytest.mark.parametrize("cp", ["2", "4", "8"])
def test_r8_every_group_that_is_allowed_passes_all_rules(cp: str) -> None:
    flags = {"parallel.cp": cp, "schedule.depth": "2", "cache.fill_nan": "true"}
    assert load_engine("decode", CommandLine(flags), {}).problems == ()


def test_r27_a_dense_layer_takes_its_shard_from_all_ranks_of_the_stage() -> None:
    """Two context ranks: different halves, not twice the first one."""
    mesh = Mesh(cp=2)
    assert [mesh.place(r).shard for r in range(2)] == [Shard(0, 2), Shard(1, 2)]
    x = torch.randn(3, SPEC.hidden_size, dtype=torch.float64)
    groups = mesh_groups(mesh)

    def output_of(stage: Stage) -> torch.Tensor:
        dense = stage.layers[0].ffn
        assert isinstance(dense, GatedMlp)
        return dense(x)

    whole = output_of(solo_stage(NANO, "float64"))

    def part(rank: int) -> torch.Tensor:
        place = mesh.place(rank)
        return output_of(open_stage(NANO, place, groups[rank], OPS, dtype="float64", device=CPU))

    assert_close(torch.stack(run_group(2, part)).sum(0), whole, 1e-12, "sum of both halves")


def test_experts_of_several_ranks_add_up_as_precisely_as_the_model_computes() -> None:
    mesh = Mesh(cp=2)
    x = torch.randn(3, SPEC.hidden_size, generator=torch.Generator().manual_seed(1))

    def added(stage: Stage) -> torch.Tensor:
        experts = stage.layers[1].ffn
        assert isinstance(experts, Moe)
        return torch.stack(experts(x)).sum(0)

    whole = added(solo_stage(NANO, "float32"))
    groups = mesh_groups(mesh)

    def both(rank: int) -> torch.Tensor:
        place = mesh.place(rank)
        return added(open_stage(NANO, place, groups[rank], OPS, dtype="float32", device=CPU))

    for found in run_group(2, both):
        assert_close(found, whole, 1e-5, "outputs")


def test_r28_seeing_context_ranks_as_tensor_ranks_changes_no_setting() -> None:
    mesh = Mesh(tp=2, cp=2)
    assert mesh.repurposed() == Mesh(tp=4)
    assert mesh == Mesh(tp=2, cp=2)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_r30_every_receiver_gets_each_of_its_heads_once(tp: int) -> None:
    pair = Pair.of(SPEC, sharding(tp, 1), sharding(1, 4))
    heads = SPEC.kda_heads
    for receiver in range(4):
        senders = [s for s in range(tp) if pair.sends_state(s, receiver)]
        own = {receiver * heads // 4 + h for h in range(heads // 4)}
        sent = [
            h for s in senders for h in range(s * heads // tp, (s + 1) * heads // tp) if h in own
        ]
        assert sorted(sent) == sorted(own)
    unpaired = [(s, r) for s in range(tp) for r in range(4) if s != r * tp // 4]
    assert not any(pair.sends_state(s, r) for s, r in unpaired)


def test_r36_a_prompts_pages_go_where_decode_will_look_for_them() -> None:
    ledger = Ledger(4, 2)
    for rank, pages in ((0, [0, 2, 4]), (1, [1, 3])):
        assert list(owned_pages(0, 5, 2, rank)) == pages
        assert list(ledger.prompt_pages(20, rank)) == pages


def test_r37_a_rank_without_pages_of_a_short_prompt_waits_for_no_page() -> None:
    pair = Pair.of(SPEC, sharding(1, 1), sharding(1, 4))
    ledger = Ledger(4, 4)
    assert ledger.content_pages(12, 3) == 0
    assert list(pair.pages(0, 3, 0, 3)) == []
    assert [list(pair.pages(0, r, 0, 3)) for r in range(3)] == [[0], [1], [2]]
    # its share of the recurrent state still comes
    senders = expected_senders(
        SPEC, sharding(1, 1), sharding(1, 4), page_tokens=4, prompt_len=12, rank=3
    )
    assert senders == (0,)
