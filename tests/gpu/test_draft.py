"""A drafter's kernels on the card in bfloat16, beside the same drafter part by part; angles far from zero."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from k3_kernels import drafts
from k3_kernels.api import ReferenceDense
from k3_kernels.layers import DraftHead
from k3_kernels.triton.dense_ops import TritonDense
from torch import Tensor

from k3.acceptance import accept
from k3.config.resolve import EMBEDDED_MODEL
from tests.compare import assert_close
from tests.draft_rings import SLOTS, WINDOW, World

pytestmark = pytest.mark.dspark
GROUP = 8


def on_card(*numbers: int) -> Tensor:
    return torch.tensor(numbers, device="cuda")


def made(world: World, base: int) -> tuple[Tensor, Tensor]:
    """Rows of the window before `base` and slots of blocks behind them, float32."""
    spec, slot_R = world.drafter.spec, torch.arange(SLOTS, device="cuda")
    begin = max(0, base - WINDOW)
    random = torch.Generator().manual_seed(base)
    shape = (base - begin, len(spec.taps) + 1, spec.target_hidden_size)
    taps = torch.randn(*shape, generator=random).bfloat16().cuda().to(world.ring.pool.dtype)
    world.write(taps[:, 1:], slot_R, on_card(2), on_card(begin), on_card(base - begin))
    rows = world.ring.pool.unflatten(0, (SLOTS, -1))[2].float()
    where = on_card(2, 2, 0), on_card(0, base - 1, 0), on_card(base, base, 0), on_card(5, 9, 0)
    return rows, world.hidden(*where).float()


@pytest.mark.parametrize("drafter", ["draft-mla", "draft-gqa"])
@pytest.mark.parametrize("base", [3, WINDOW, 12_345, 1_000_003])
def test_rows_and_blocks_equal_those_made_part_by_part(drafter: str, base: int) -> None:
    """float32 to its precision; bfloat16 as near to float32 as the parts in bfloat16 are, with a tenth of room."""
    folder = EMBEDDED_MODEL / drafter
    kinds = [(TritonDense(), torch.float32), (TritonDense(), torch.bfloat16)]
    kinds += [(ReferenceDense(), torch.float32), (ReferenceDense(), torch.bfloat16)]
    found = [made(World.of(folder, ops, dtype, GROUP - 1, "cuda"), base) for ops, dtype in kinds]
    for what, ours, ours_bf16, exact, parts_bf16 in zip(("ring", "slots"), *found, strict=True):
        assert_close(ours, exact, 1e-3, what)
        assert torch.equal(ours_bf16.isnan(), exact.isnan()), f"{what}: what nobody wrote"
        errors = [(x - exact).nan_to_num().square().mean().sqrt() for x in (ours_bf16, parts_bf16)]
        assert errors[0] <= 1.1 * errors[1], f"{what}: {errors}"


@pytest.mark.parametrize("drafter", ["draft-mla", "draft-gqa"])
def test_long_rings_are_shared_by_several_programs(drafter: str) -> None:
    """float32: four and more parts, some of them empty."""
    ours, parts = (
        World.of(EMBEDDED_MODEL / drafter, ops, torch.float32, GROUP - 1, "cuda", places=260)
        for ops in (TritonDense(), ReferenceDense())
    )
    parts.ring.pool.normal_()
    ours.ring.pool.copy_(parts.ring.pool)
    where = (
        on_card(1, 2, 3, 4),
        on_card(0, 0, 900, 0),
        on_card(2050, 70, 1000, 1),
        on_card(*range(4)),
    )
    assert_close(ours.hidden(*where), parts.hidden(*where), 1e-3, "slots")


@pytest.mark.parametrize("vocabulary, rank", [(4096, 64), (163840, 256), (333, 5)])
@pytest.mark.parametrize("n_rows", [1, 3, 32])
def test_drafts_are_the_best_from_left_to_right(vocabulary: int, rank: int, n_rows: int) -> None:
    """Whether a draft is the best is asked of the logits that follow from the drafts before it."""
    torch.manual_seed(rank)
    logits = torch.randn(n_rows, 7, vocabulary, device="cuda")
    table, out = (torch.randn(vocabulary, rank, device="cuda") for _ in range(2))
    ops, anchor_B = TritonDense(), torch.arange(n_rows, device="cuda")
    drafted_BK = ops.draft_tokens(DraftHead(table, ops.projection(out)))(logits, anchor_B)
    before_BK = torch.cat((anchor_B.unsqueeze(1), drafted_BK[:, :-1]), 1)
    for i in range(7):
        value_BV = logits[:, i].double() + table[before_BK[:, i]].double() @ out.double().T
        chosen = value_BV.gather(1, drafted_BK[:, i : i + 1]).squeeze(1)
        assert_close(chosen, value_BV.amax(1), 1e-3, f"slot {i}")


def test_logits_may_lie_further_apart_than_32_bits_count() -> None:
    """Many rows of a large vocabulary: 3 rows of a tensor of 9 GB, of which little is touched."""
    torch.manual_seed(1)
    near = torch.randn(3, 2, 333, device="cuda")
    row = 2**30 + 8
    far = torch.empty(2 * row + near[0].numel(), device="cuda").as_strided(
        near.shape, (row, 333, 1)
    )
    table, out = (torch.randn(333, 5, device="cuda") for _ in range(2))
    ops, anchor_B = TritonDense(), on_card(1, 2, 3)
    head = ops.draft_tokens(DraftHead(table, ops.projection(out)))
    assert torch.equal(head(far.copy_(near), anchor_B), head(near, anchor_B))


@pytest.mark.parametrize("vocabulary", [4096, 163840, 333])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_groups_are_judged_as_torch_does(vocabulary: int, dtype: torch.dtype) -> None:
    torch.manual_seed(vocabulary)
    logits = torch.randn(5, GROUP, vocabulary, device="cuda").bfloat16().to(dtype)  # equal ones too
    best = logits.argmax(-1)
    drafts_BK = best[:, :-1].clone()
    for b in range(5):
        drafts_BK[b, b] += 1
    words = torch.zeros(3, 9, dtype=torch.int64, device="cuda")
    start_B, draft_len_B = on_card(5, 50, 500, 5000, 0), on_card(7, 7, 7, 2, 7)
    judge = drafts.greedy_judge(TritonDense())
    assert judge is not None
    rows = drafts.RowWords(start_B, *words)
    drawn_BX = judge(logits, drafts_BK, draft_len_B, on_card(4, 2, 8, 1, 0), rows)
    accepted_B = accept(best, drafts_BK, draft_len_B)
    assert torch.equal(drawn_BX, torch.cat((best, accepted_B.unsqueeze(1)), 1))
    assert words[0].tolist() == [0, 5003, 52, 0, 6, 0, 0, 0, 503]
