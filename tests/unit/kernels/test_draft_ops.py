"""What speculation consists of by each backend equals the same part by part; rings start as NaN.

Triton's kernels run in the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
from k3_kernels import drafts
from k3_kernels.api import ReferenceDense
from k3_kernels.cpu import library
from k3_kernels.cpu.dense import most_tokens
from k3_kernels.cpu.draft_ops import NativeDraft
from k3_kernels.layers import DraftHead, Slices, draft_tokens
from k3_kernels.triton.dense_ops import TritonDense
from k3_kernels.triton.draft_attend import swiglu
from torch import Tensor

from decode_svc.ledger import Ledger
from decode_svc.rank.rows import NO_ROWS, RowTable
from decode_svc.rank.tables import TableBuffers
from k3.acceptance import accept
from k3.config.resolve import EMBEDDED_MODEL
from k3.model.spec import K3Spec
from k3.parallel.mesh import Mesh
from tests.compare import assert_close
from tests.draft_rings import PAGE, PLACES, SLOTS, WINDOW, World
from tests.drafters import random_drafter
from tests.model_runner import CPU
from tests.thread_group import mesh_groups, run_group

pytestmark = pytest.mark.dspark
BLOCK, NOBODYS_PLACES = 5, 3
is_native = pytest.mark.skipif(not library.is_built(), reason="no C++ compiler at install")
MAKERS = [
    pytest.param(TritonDense, id="triton"),
    pytest.param(NativeDraft, id="native", marks=is_native),
]
CASES = [
    pytest.param(TritonDense, torch.float32, 2e-4, id="triton float32"),
    pytest.param(TritonDense, torch.float16, 2e-2, id="triton float16"),
    pytest.param(NativeDraft, torch.float32, 2e-4, id="native float32", marks=is_native),
    pytest.param(NativeDraft, torch.float64, 1e-11, id="native float64", marks=is_native),
]
Make = Callable[[], Any]


@pytest.fixture(scope="module", params=["mla", "gqa", "draft-gqa"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded one has two query heads of a key head."""
    if request.param == "draft-gqa":
        return EMBEDDED_MODEL / request.param
    spec = K3Spec.from_folder(EMBEDDED_MODEL)
    where = tmp_path_factory.mktemp("drafter")
    return random_drafter(where, spec, request.param, seed=5, block=BLOCK)


def worlds(
    make: Make, folder: Path, dtype: torch.dtype, places: int = PLACES
) -> tuple[World, World]:
    """By the kernels, and part by part."""
    ours, parts = (
        World.of(folder, ops, dtype, BLOCK, places=places) for ops in (make(), ReferenceDense())
    )
    if make is NativeDraft and ours.drafter.spec.flavour != "mla":
        assert not ours.drafter.reads_rings(1)
        pytest.skip(
            "the native library has latent attention only; others are computed part by part"
        )
    assert ours.drafter.reads_rings(1)
    assert ours.drafter.rows is not None
    assert not parts.drafter.reads_rings(1)
    return ours, parts


def taps(world: World, n_tokens: int, seed: int) -> Tensor:
    """[T, X, D], columns of a wider tensor as in a frame."""
    spec = world.drafter.spec
    random = torch.Generator().manual_seed(seed)
    n_taps, width = len(spec.taps), spec.target_hidden_size
    wider = torch.randn(n_tokens, n_taps + 2, width, generator=random)
    return wider.to(world.ring.pool.dtype)[:, 2:]


@pytest.mark.parametrize("make, dtype, tolerance", CASES)
def test_rows_of_what_was_accepted_are_stored_and_no_others(
    make: Make, folder: Path, dtype: torch.dtype, tolerance: float
) -> None:
    ours, parts = worlds(make, folder, dtype)
    slot_R = torch.tensor([0, 3, 1, 2])
    rows_B, start_B = torch.tensor([2, 0, 3]), torch.tensor([PAGE - 2, 0, 3 * PAGE * 7 - 1])
    group = taps(ours, 3 * 4, 1)
    for accepted in ([3, 3, 0], [0, 1, 2]):
        for world in (ours, parts):
            world.write(group, slot_R, rows_B, start_B, torch.tensor(accepted))
        start_B = start_B + torch.tensor(accepted) + 1
    own = slice(NOBODYS_PLACES, None)  # what lies in nobody's slot does not matter
    assert_close(ours.ring.pool[own], parts.ring.pool[own], tolerance, "ring")


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("bound", [200, 5000], ids=["alone", "in parts"])
def test_blocks_look_at_long_rings(make: Make, folder: Path, bound: int) -> None:
    """Several programs share a ring of Triton's: fewer keys than parts, tiles that end inside one, a full window."""
    ours, parts = worlds(make, folder, torch.float32, places=126)
    parts.ring.pool.normal_(generator=torch.Generator().manual_seed(2))
    ours.ring.pool.copy_(parts.ring.pool)
    base_B = torch.tensor([min(base, bound) for base in (3, 0, 700, 1700)])
    where = torch.tensor([1, 2, 3, 4]), torch.tensor([0, NO_ROWS, 2, 0]), base_B, base_B + 1
    assert_close(ours.hidden(*where, bound), parts.hidden(*where), 6e-4, "slots")


@pytest.mark.parametrize("make, dtype, tolerance", CASES)
def test_blocks_over_a_ring_equal_blocks_over_what_was_read(
    make: Make, folder: Path, dtype: torch.dtype, tolerance: float
) -> None:
    """No context, less than a page, a page and one, a ring that wrapped; rows that came late; nobody's row."""
    ours, parts = worlds(make, folder, dtype)
    slot_R = torch.arange(SLOTS)
    bases = [1, PAGE - 1, PAGE + 1, WINDOW + 5 * PAGE + 3]
    for slot, base in enumerate(bases, start=1):
        oldest = max(0, base - WINDOW - 2)
        group = taps(ours, base - oldest, slot)
        for world in (ours, parts):
            where = torch.tensor([slot]), torch.tensor([oldest]), torch.tensor([base - oldest])
            world.write(group, slot_R, *where)
    slot_B = torch.tensor([1, 2, 3, 4, 4, 0, 2])
    base_B = torch.tensor([bases[0], bases[1], bases[2], bases[3], bases[3], 0, bases[1]])
    start_B = torch.tensor([0, 0, 2, 0, bases[3] - 1, NO_ROWS, NO_ROWS])
    anchor_B = torch.arange(7) * 11 + 3
    where = slot_B, start_B, base_B, anchor_B
    assert_close(ours.hidden(*where), parts.hidden(*where), 3 * tolerance, "slots")


@is_native
def test_as_many_blocks_over_rings_as_packed_products_are_worth(folder: Path) -> None:
    """Any number with one thread; the ways are those of the other layers (`dense.most_tokens`)."""
    ours, _ = worlds(NativeDraft, folder, torch.float32)
    most = most_tokens()
    assert ours.drafter.reads_rings(most // BLOCK)
    assert not ours.drafter.reads_rings(most // BLOCK + 1)


# ------------------------------------------------------------------ drafts


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(
    "n_rows, n_slots, vocabulary, rank",
    [(1, 1, 1, 1), (3, 4, 150, 6), (2, 7, 64, 16), (2, 3, 150, 70)],
)
def test_drafts_are_the_best_from_left_to_right(
    make: Make, n_rows: int, n_slots: int, vocabulary: int, rank: int
) -> None:
    random = torch.Generator().manual_seed(vocabulary)
    logits, table, out = (
        torch.randn(*shape, generator=random)
        for shape in ((n_rows, n_slots + 2, vocabulary), (vocabulary, rank), (vocabulary, rank))
    )
    anchor_B = torch.arange(n_rows) % vocabulary
    expected, previous = [], anchor_B
    for i in range(n_slots):
        previous = (logits[:, i] + table[previous] @ out.T).argmax(-1)
        expected.append(previous)
    ops = make()
    head = ops.draft_tokens(DraftHead(table, ops.projection(out)))
    assert torch.equal(head(logits[:, :n_slots], anchor_B), torch.stack(expected, 1))


def special(kind: str, n_rows: int, n: int, vocabulary: int) -> Tensor:
    """Logits [n_rows, n, vocabulary] whose best is a matter of rules."""
    logits = torch.zeros(n_rows, n, vocabulary)
    match kind:
        case "equal":
            logits[..., [11, 30, 152]] = 4.0
        case "nan":
            logits[..., [17, 152]] = torch.nan
            logits[..., 3] = torch.inf
        case "infinite":
            logits[..., 40:145] = torch.inf
            logits[..., 7] = -torch.inf
        case "nothing":
            logits[:] = -torch.inf
        case "zeros":
            logits[..., 3:] = -0.0
            logits[..., :3] = -1.0
        case _:
            logits[..., 152] = 1.0
    return logits


KINDS = ["equal", "nan", "infinite", "nothing", "zeros", "tail"]


@pytest.mark.parametrize("n_ranks, own, rank", [(2, 150, 6), (3, 50, 70), (4, 33, 16)])
def test_drafts_from_slices_are_those_from_the_whole_vocabulary(
    n_ranks: int, own: int, rank: int
) -> None:
    """Rows lie apart; equal ones in the first and the last slice. One rank at a time is in the interpreter."""
    random, alone = torch.Generator().manual_seed(own), Lock()
    logits = torch.randn(17, 3, n_ranks * own, generator=random).bfloat16()
    table, out = torch.randn(2, n_ranks * own, rank, generator=random)
    logits[:3, 0, [5, -1]], out[-1] = 40.0, out[5]
    ops, anchor_B = TritonDense(), torch.randint(0, n_ranks * own, (17,), generator=random)
    head, groups = DraftHead(table, ops.projection(out)), mesh_groups(Mesh(cp=n_ranks))

    def body(r: int) -> Tensor:
        def gather(best_TP: Tensor) -> Tensor:
            alone.release()
            everybody = groups[r].shard.all_gather(best_TP, 1)
            alone.acquire()
            return everybody

        tokens = draft_tokens(ops, head, Slices(own * r, gather))
        assert tokens is not None
        with alone:
            return tokens(logits.chunk(n_ranks, -1)[r], anchor_B)

    with alone:
        whole = ops.draft_tokens(head)(logits.float(), anchor_B)
    assert all(torch.equal(found, whole) for found in run_group(n_ranks, body))
    assert whole[:3, 0].tolist() == [5, 5, 5]
    assert len(set((whole // own).flatten().tolist())) == n_ranks, "every slice has a best one"


def test_a_joint_projection_whose_rows_lie_apart_is_activated() -> None:
    projection = TritonDense().projection(torch.randn(2 * 97, 8))
    gate_up = projection(torch.randn(3, 8))
    assert not gate_up.is_contiguous(), "rows are aligned"
    gate, up = gate_up.chunk(2, -1)
    torch.testing.assert_close(swiglu(gate_up), torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_the_first_of_the_best_as_torch_has_it(make: Make, kind: str) -> None:
    logits = special(kind, 2, 3, 153)
    table, ops = torch.zeros(153, 6), make()
    head = ops.draft_tokens(DraftHead(table, ops.projection(table)))
    assert torch.equal(head(logits, torch.tensor([0, 152])), logits.argmax(-1))


# ------------------------------------------------------------------ judgement


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_group_is_judged_by_the_first_of_the_best(make: Make, kind: str) -> None:
    logits = special(kind, 2, 3, 153)
    drawn_BX, _ = judged(
        make, logits, torch.zeros(2, 2, dtype=torch.int64), torch.tensor([2, 2]), [1, 2]
    )
    assert torch.equal(drawn_BX[:, :-1], logits.argmax(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_slices_are_judged_as_the_whole_vocabulary(kind: str, dtype: torch.dtype) -> None:
    """Equal ones in several slices and in parts of one; rows lie apart, as aligned ones do."""
    n_slices, vocabulary = 3, 3 * 4097
    logits = special(kind, 2, 3, vocabulary).to(dtype)
    drafts_BK = logits.argmax(-1)[:, :-1]
    parts: list[Tensor] = []

    def gather(best_TP: Tensor) -> Tensor:
        parts.append(best_TP)
        return torch.cat(parts, 1)

    found = [
        judged(TritonDense, own, drafts_BK, torch.tensor([2, 1]), [1, 2], slices)
        for own, slices in (
            (own, Slices(r * 4097, gather)) for r, own in enumerate(logits.chunk(n_slices, -1))
        )
    ]
    drawn_BX, table = found[-1]
    assert torch.equal(drawn_BX[:, :-1], logits.argmax(-1))
    assert drawn_BX[:, -1].tolist() == table.read_column_R[1:3].tolist() == [2, 1]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("n_drafts", [0, 1, 2, 7])
def test_rows_go_on_behind_the_accepted_drafts(make: Make, n_drafts: int) -> None:
    """Against the reference's verdict and commit: wrong drafts at every place, padding, nobody's row twice."""
    vocabulary, group = 37, n_drafts + 1
    random = torch.Generator().manual_seed(n_drafts)
    rows = [3, 0, 5, 1, 0, 2]
    n_rows = len(rows)
    logits = torch.randn(n_rows, group, vocabulary, generator=random)
    right = logits.argmax(-1)
    drafts_RK = right[:, :n_drafts].clone()
    for b in range(n_rows):
        if b < n_drafts:
            drafts_RK[b, b] = (drafts_RK[b, b] + 1) % vocabulary
    draft_len_B = torch.tensor([n_drafts, 0, n_drafts, n_drafts // 2, n_drafts, n_drafts])
    drawn_BX, table = judged(make, logits, drafts_RK, draft_len_B, rows)
    accepted_B = accept(right, drafts_RK, draft_len_B)
    assert torch.equal(drawn_BX, torch.cat((right, accepted_B.unsqueeze(1)), 1))
    expected = RowTable(6, 2, n_drafts, vocabulary, torch.device("cpu"))
    bonus_B = right.gather(1, accepted_B.unsqueeze(1)).squeeze(1)
    expected.commit(torch.tensor(rows), torch.arange(n_rows) * 10, accepted_B, bonus_B)
    real = [row for row in rows if row]
    for name in ("base_R", "anchor_R", "read_column_R"):
        got, wanted = getattr(table, name), getattr(expected, name)
        assert torch.equal(got[real], wanted[real]), name
    assert table.base_R[0] == 0
    assert table.base_R[4] == 0, "a row that took no part stays as it was"


def judged(
    make: Make,
    logits: Tensor,
    drafts_BK: Tensor,
    draft_len_B: Tensor,
    rows: list[int],
    slices: Slices | None = None,
) -> tuple[Tensor, RowTable]:
    """Groups that began at 0, 10, 20 .."""
    table = RowTable(6, 2, drafts_BK.shape[1], logits.shape[2], torch.device("cpu"))
    start_B = torch.arange(len(rows)) * 10
    words = drafts.RowWords(start_B, table.base_R, table.anchor_R, table.read_column_R)
    judge = drafts.greedy_judge(make(), slices)
    assert judge is not None
    return judge(logits, drafts_BK, draft_len_B, torch.tensor(rows), words), table


# ------------------------------------------------------------------ tables


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("cp, cp_rank", [(1, 0), (3, 0), (3, 2)])
@pytest.mark.parametrize("group, n_drafts", [(1, 0), (1, 5), (4, 5), (6, 5)])
def test_tables_of_a_step_equal_those_derived_part_by_part(
    make: Make, group: int, n_drafts: int, cp: int, cp_rank: int
) -> None:
    """Bases around every boundary, pages that are missing, the table's end, limits, nobody's rows."""
    width, page_tokens, n_rows = 3, 4, 7
    random = torch.Generator().manual_seed(group + cp)
    table = RowTable(n_rows, width, n_drafts, 50, CPU)
    ledger = Ledger(page_tokens, cp)
    rows = [5, 0, 3, 1, 7, 0, 2]
    for words in (table.anchor_R, table.drafts_RK, table.read_column_R):
        words.random_(0, 50, generator=random)
    table.base_R.random_(0, width * page_tokens * cp, generator=random)
    table.base_R[[5, 3]] = torch.tensor([page_tokens * cp - 1, width * page_tokens * cp - 1])
    table.base_R[0] = 0
    table.draft_len_R.random_(0, n_drafts + 1, generator=random)
    table.pages_RW.random_(-1, 9, generator=random)
    found = []
    for whole in (drafts.derive_tables(make()), None):
        buffers = TableBuffers(table, ledger, cp_rank, n_rows, 1 + n_drafts, whole)
        for buffer in buffers.buffers().values():
            buffer.fill_(-77)
        buffers.choose(rows, [n_drafts, 0, n_drafts // 2, *[n_drafts] * 4])
        batch = buffers.derive(n_rows, 40, group)
        found.append((batch.drafts_BK, buffers.buffers()))
    assert torch.equal(found[0][0], found[1][0])
    for name, expected in found[1][1].items():
        assert torch.equal(found[0][1][name], expected), name
