"""A drafter by Triton's kernels, in the interpreter, equals one computed part by part; rings start as NaN."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from k3_kernels import drafts
from k3_kernels.api import Projection, ReferenceDense
from k3_kernels.layers import DraftHead
from k3_kernels.triton import draft_attend
from k3_kernels.triton.dense_ops import TritonDense
from k3_kernels.triton.products import Product
from safetensors.torch import save_file
from torch import Tensor

from decode_svc.ledger import Ledger
from decode_svc.rank.rows import NO_ROWS, RowTable
from decode_svc.rank.tables import TableBuffers
from k3.acceptance import accept
from k3.config.resolve import EMBEDDED_MODEL
from k3.model.dspark_spec import DraftSpec
from k3.model.registry import open_stage
from k3.model.spec import K3Spec
from k3.parallel.collectives import solo_groups
from k3.parallel.mesh import SOLO
from k3.types import SamplingParams
from tests.compare import assert_close
from tests.draft_rings import PAGE, SLOTS, WINDOW, World
from tests.drafters import LocalEngine, random_drafter
from tests.model_runner import CPU, OPS

pytestmark = pytest.mark.dspark
NANO = Path(__file__).parents[2] / "golden/k3"
BLOCK, NOBODYS_PLACES = 5, 3
DTYPES = [
    pytest.param(torch.float32, 2e-4, id="float32"),
    pytest.param(torch.float16, 2e-2, id="float16"),
]


@pytest.fixture(scope="module", params=["mla", "gqa", "draft-gqa"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded one has two query heads of a key head."""
    if request.param == "draft-gqa":
        return EMBEDDED_MODEL / request.param
    spec = K3Spec.from_folder(EMBEDDED_MODEL)
    where = tmp_path_factory.mktemp("drafter")
    return random_drafter(where, spec, request.param, seed=5, block=BLOCK)


def worlds(folder: Path, dtype: torch.dtype) -> tuple[World, World]:
    """By the kernels, and part by part."""
    ours, parts = (World.of(folder, ops, dtype, BLOCK) for ops in (TritonDense(), ReferenceDense()))
    assert ours.drafter.reads_rings
    assert ours.drafter.rows is not None
    assert not parts.drafter.reads_rings
    return ours, parts


def taps(world: World, n_tokens: int, seed: int) -> Tensor:
    """[T, X, D], columns of a wider tensor as in a frame."""
    spec = world.drafter.spec
    random = torch.Generator().manual_seed(seed)
    n_taps, width = len(spec.taps), spec.target_hidden_size
    wider = torch.randn(n_tokens, n_taps + 2, width, generator=random)
    return wider.to(world.ring.pool.dtype)[:, 2:]


@pytest.mark.parametrize("dtype, tolerance", DTYPES)
def test_rows_of_what_was_accepted_are_stored_and_no_others(
    folder: Path, dtype: torch.dtype, tolerance: float
) -> None:
    ours, parts = worlds(folder, dtype)
    slot_R = torch.tensor([0, 3, 1, 2])
    rows_B, start_B = torch.tensor([2, 0, 3]), torch.tensor([PAGE - 2, 0, 3 * PAGE * 7 - 1])
    group = taps(ours, 3 * 4, 1)
    for accepted in ([3, 3, 0], [0, 1, 2]):
        for world in (ours, parts):
            world.write(group, slot_R, rows_B, start_B, torch.tensor(accepted))
        start_B = start_B + torch.tensor(accepted) + 1
    own = slice(NOBODYS_PLACES, None)  # what lies in nobody's slot does not matter
    assert_close(ours.ring.pool[own], parts.ring.pool[own], tolerance, "ring")


@pytest.mark.parametrize("dtype, tolerance", DTYPES)
def test_blocks_over_a_ring_equal_blocks_over_what_was_read(
    folder: Path, dtype: torch.dtype, tolerance: float
) -> None:
    """No context, less than a page, a page and one, a ring that wrapped; rows that came late; nobody's row."""
    ours, parts = worlds(folder, dtype)
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


@pytest.mark.parametrize("bound", [400, 5000], ids=["alone", "in parts"])
def test_long_rings_are_shared_by_several_programs(folder: Path, bound: int) -> None:
    """Fewer keys than parts, tiles that end inside a part, a full window."""
    ours, parts = (
        World.of(folder, ops, torch.float32, BLOCK, places=126)
        for ops in (TritonDense(), ReferenceDense())
    )
    parts.ring.pool.normal_(generator=torch.Generator().manual_seed(2))
    ours.ring.pool.copy_(parts.ring.pool)
    base_B = torch.tensor([min(base, bound) for base in (3, 0, 700, 1700)])
    where = torch.tensor([1, 2, 3, 4]), torch.tensor([0, NO_ROWS, 2, 0]), base_B, base_B + 1
    assert_close(ours.hidden(*where, bound), parts.hidden(*where), 6e-4, "slots")


def test_a_layer_too_large_for_a_program_is_computed_part_by_part(tmp_path: Path) -> None:
    spec = K3Spec.from_folder(EMBEDDED_MODEL)
    folder = random_drafter(tmp_path, spec, "mla", seed=5, block=BLOCK)
    config = json.loads((folder / "config.json").read_text())
    config["kv_lora_rank"] = 2 * draft_attend.WIDEST["latent"]
    large = DraftSpec.from_config(config)
    random = torch.Generator().manual_seed(1)
    shapes = {name: shape for name, (shape,) in large.tensors(confidence=False).items()}
    save_file(
        {name: torch.randn(*shape, generator=random) for name, shape in shapes.items()},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps(config))
    drafter = World.of(folder, TritonDense(), torch.float32, BLOCK).drafter
    assert not drafter.reads_rings
    assert drafter.rows is not None


class TargetByTorch(ReferenceDense, TritonDense):
    """The kernels for drafts alone: in the interpreter the target's would take minutes."""

    def projection(self, weight_OI: Tensor) -> Projection:
        return Product(weight_OI)


@pytest.mark.parametrize("flavour", ["mla", "gqa"])
def test_a_speculating_engine_drafts_and_emits_the_same(tmp_path: Path, flavour: str) -> None:
    """Known followers, so that drafts are accepted; biased logits, so that the judge reads edited ones."""
    spec = K3Spec.from_folder(NANO)
    follows = [(token, (7 * token + 3) % 97) for token in range(spec.vocab_size)]
    folder = random_drafter(tmp_path, spec, flavour, 9, block=3, follows=follows)
    taps = DraftSpec.from_folder(folder).taps
    stages = (
        open_stage(NANO, SOLO, solo_groups(), ops, dtype="float32", device=CPU, taps=taps)
        for ops in (replace(OPS, dense=TargetByTorch()), OPS)
    )
    how = [SamplingParams(temperature=0.0), SamplingParams(temperature=0.0, logit_bias={5: 9.0})]
    ours, reference = (
        LocalEngine(
            stage, 2, 40, drafter=folder, draft_tokens=3, window=8, dtype="float32"
        ).generate([list(range(3, 12)), [9, 4]], 9, how)
        for stage in stages
    )
    assert [a.ids for a in ours] == [a.ids for a in reference]
    assert [a.accepted for a in ours] == [a.accepted for a in reference]


# ------------------------------------------------------------------ drafts


@pytest.mark.parametrize(
    "n_rows, n_slots, vocabulary, rank", [(1, 1, 1, 1), (3, 4, 150, 6), (2, 7, 64, 16)]
)
def test_drafts_are_the_best_from_left_to_right(
    n_rows: int, n_slots: int, vocabulary: int, rank: int
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
    ops = TritonDense()
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


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_the_first_of_the_best_as_torch_has_it(kind: str) -> None:
    logits = special(kind, 2, 3, 153)
    table, ops = torch.zeros(153, 6), TritonDense()
    head = ops.draft_tokens(DraftHead(table, ops.projection(table)))
    assert torch.equal(head(logits, torch.tensor([0, 152])), logits.argmax(-1))


# ------------------------------------------------------------------ judgement


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_is_judged_by_the_first_of_the_best(kind: str) -> None:
    logits = special(kind, 2, 3, 153)
    drawn_BX, _ = judged(logits, torch.zeros(2, 2, dtype=torch.int64), torch.tensor([2, 2]), [1, 2])
    assert torch.equal(drawn_BX[:, :-1], logits.argmax(-1))


@pytest.mark.parametrize("n_drafts", [0, 1, 2, 7])
def test_rows_go_on_behind_the_accepted_drafts(n_drafts: int) -> None:
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
    drawn_BX, table = judged(logits, drafts_RK, draft_len_B, rows)
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
    logits: Tensor, drafts_BK: Tensor, draft_len_B: Tensor, rows: list[int]
) -> tuple[Tensor, RowTable]:
    """Groups that began at 0, 10, 20 .."""
    table = RowTable(6, 2, drafts_BK.shape[1], logits.shape[2], torch.device("cpu"))
    start_B = torch.arange(len(rows)) * 10
    words = drafts.RowWords(start_B, table.base_R, table.anchor_R, table.read_column_R)
    judge = drafts.greedy_judge(TritonDense())
    assert judge is not None
    return judge(logits, drafts_BK, draft_len_B, torch.tensor(rows), words), table


# ------------------------------------------------------------------ tables


@pytest.mark.parametrize("cp, cp_rank", [(1, 0), (3, 0), (3, 2)])
@pytest.mark.parametrize("group, n_drafts", [(1, 0), (1, 5), (4, 5), (6, 5)])
def test_tables_of_a_step_equal_those_derived_part_by_part(
    group: int, n_drafts: int, cp: int, cp_rank: int
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
    for whole in (drafts.derive_tables(TritonDense()), None):
        buffers = TableBuffers(table, ledger, cp_rank, n_rows, 1 + n_drafts, whole)
        for buffer in buffers.buffers().values():
            buffer.fill_(-77)
        buffers.choose(rows, [n_drafts, 0, n_drafts // 2, *[n_drafts] * 4])
        batch = buffers.derive(n_rows, 40, group)
        found.append((batch.drafts_BK, buffers.buffers()))
    assert torch.equal(found[0][0], found[1][0])
    for name, expected in found[1][1].items():
        assert torch.equal(found[0][1][name], expected), name
