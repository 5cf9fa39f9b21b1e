"""Faults that other projects' speculation has had, each as a test of its own name.

Most are silent: tokens stay right and only drafts get worse. So drafts themselves are compared, with those of a witness
that has no steps, no pages and no rings: one forward over everything before the anchor, at absolute positions. The
numbers are those of the list the design keeps. Not here: 5, positions of a chunk (tests of prefill's stage); 11 and 18,
stale confidences and missing proposals (tests of decode's ranks); 13 and 14, YaRN, eps and scales (golden drafters).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from decode_svc.rank.graphs import PassThrough
from k3.bench.suites import choose
from k3.errors import K3Error
from k3.model.draft_ring import Context
from k3.model.dspark import open_drafter
from k3.model.dspark_spec import DraftSpec
from k3.model.spec import K3Spec
from k3.parallel.collectives import solo_groups
from k3.parallel.mesh import WHOLE, Mesh
from k3.types import SamplingParams, TokenEvent
from tests.decode_group import Ask, DecodeGroup, Model
from tests.drafters import LocalEngine, random_drafter
from tests.model_runner import CPU, OPS, Pools, solo_stage
from tests.prefilled import Prefill

pytestmark = pytest.mark.dspark

NANO = Path(__file__).parents[1] / "golden" / "k3"
SPEC = K3Spec.from_folder(NANO)
K, WINDOW, N_TOKENS = 7, 16, 10
LENGTHS = (1, 2, 4, 5, 9, 16, 17, 30)
LONGEST = max(LENGTHS) + N_TOKENS
GREEDY = SamplingParams(temperature=0.0)
FLAVOURS = {"mla": "prefix", "gqa": "mixture"}
FAR = 1 << 40
QUIET = 0.6  # what the block says decides most drafts, and some are accepted


def prompts() -> list[list[int]]:
    rng = random.Random(8)
    return [[rng.randrange(SPEC.vocab_size) for _ in range(n)] for n in LENGTHS]


PROMPTS = prompts()
SEEDED = [SamplingParams(temperature=0.8, top_p=0.9, seed=50 + i) for i in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def truth() -> dict[str, list[list[int]]]:
    """Answers of plain decoding."""
    stage = solo_stage(NANO, "float64")
    rules = {"greedy": [GREEDY] * len(PROMPTS), "seeded": SEEDED}
    return {
        name: [
            answer.ids
            for answer in LocalEngine(stage, len(PROMPTS), LONGEST).generate(PROMPTS, N_TOKENS, how)
        ]
        for name, how in rules.items()
    }


@pytest.fixture(scope="module")
def folder(truth, tmp_path_factory):
    """Drafter folders by flavour; they half know what follows what."""
    known = [pair for answers in truth.values() for ids in answers for pair in pairwise(ids)]

    @cache
    def make(flavour: str) -> Path:
        path = tmp_path_factory.mktemp("drafter") / flavour
        return random_drafter(
            path, SPEC, flavour, 4, FLAVOURS[flavour], follows=known, loudness=QUIET
        )

    return make


class Witness:
    """Drafts by the definition: every context row computed at once from one forward."""

    def __init__(self, folder: Path) -> None:
        spec = DraftSpec.from_folder(folder)
        self.stage = solo_stage(NANO, "float64", taps=spec.taps, tap_stream=spec.tap_stream)
        assert self.stage.embed is not None
        assert self.stage.head is not None
        self.drafter = open_drafter(
            folder,
            WHOLE,
            solo_groups().shard,
            draft_tokens=K,
            embed=self.stage.embed,
            head=self.stage.head,
            dtype="float64",
            device=CPU,
            ops=OPS.dense,
        )

    def drafts(self, ids: Sequence[int], start: int = 0) -> list[int]:
        """For the group whose anchor is the last of `ids`; rows from `start` on, at most the window."""
        base = len(ids) - 1
        pools = Pools(self.stage, 1, base)
        taps = pools.chunk([(pools.requests[0], ids[:base])]).taps_TXD
        first = max(start, base - WINDOW, 0)
        rows = self.drafter.context(taps[first:], torch.arange(first, base))
        context = Context(rows.unsqueeze(0), torch.ones(1, base - first, dtype=torch.bool))
        return self.drafter.propose(context, torch.tensor([ids[-1]]), torch.tensor([base]))[
            0
        ].tolist()


@pytest.fixture(scope="module", params=FLAVOURS)
def flavour(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def witness(flavour, folder) -> Witness:
    return Witness(folder(flavour))


@pytest.fixture(scope="module")
def sent(flavour, folder) -> list[Mapping[str, Tensor]]:
    """What prefill sends of each prompt, computed five tokens at a time."""
    prefill = Prefill(NANO, folder(flavour))
    return [prefill(prompt, chunk=5) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def model(flavour, folder) -> Model:
    return Model.open(NANO, Mesh(), folder(flavour))


@pytest.fixture(scope="module")
def spread(flavour, folder) -> Model:
    return Model.open(NANO, Mesh(cp=4), folder(flavour))


def asks(sent, truth, rule: str = "greedy") -> list[Ask]:
    how = SEEDED if rule == "seeded" else [GREEDY] * len(PROMPTS)
    return [
        Ask(prompt, caches, TokenEvent(ids[0]), params, N_TOKENS)
        for prompt, caches, ids, params in zip(PROMPTS, sent, truth[rule], how, strict=True)
    ]


def cold(ask: Ask) -> Ask:
    """The same request whose draft rows did not come."""
    return replace(ask, sent={name: pool for name, pool in ask.sent.items() if name != "draft"})


def expect_drafts(group: DecodeGroup, witness: Witness, *, is_cold: bool = False) -> int:
    """Hold the drafts of every running request against the witness; how many were compared."""
    n = 0
    for request in group.running():
        ids = [*request.spec.prompt, *(token.id for token in request.outputs)]
        start = request.prompt_len if is_cold else 0
        for table in group.tables():
            found = table.drafts_RK[request.held.row.index].tolist()
            assert found == witness.drafts(ids, start), f"{request!r} at base {request.base}"
        n += 1
    return n


def run_beside(group: DecodeGroup, witness: Witness, asked: Sequence[Ask], **more: bool) -> int:
    """Play all requests; after every step compare every draft."""
    requests = [group.submit(ask) for ask in asked]
    n = 0
    while group.scheduler.open_requests():
        group.step(requests)
        n += expect_drafts(group, witness, **more)
    return n


def test_01_slots_are_not_off_by_one(witness):
    """Slot 0, the anchor's own, predicts the first draft."""
    ids = PROMPTS[5]
    context = Context(
        witness.drafter.context(
            torch.zeros(1, 3, SPEC.hidden_size, dtype=torch.float64), torch.tensor([0])
        ).unsqueeze(0),
        torch.ones(1, 1, dtype=torch.bool),
    )
    anchor, base = torch.tensor([ids[0]]), torch.tensor([1])
    hidden = witness.drafter.hidden(context, anchor, base)
    head = witness.drafter.sequential
    bias, _ = head(anchor, hidden[:, 0], head.start(1))
    wanted = int((witness.stage.head(hidden[:, 0]) + bias).argmax())
    assert int(witness.drafter.propose(context, anchor, base)[0, 0]) == wanted


def test_02_taps_are_of_the_layer_and_stream_the_checkpoint_names():
    """Completed layers, the embedding being -1; `prefix` is the running sum after the layer."""
    ids = PROMPTS[7]
    stage = solo_stage(NANO, "float64", taps=(-1, 0, 3))
    pools = Pools(stage, 1, len(ids))
    taps = pools.chunk([(pools.requests[0], ids)]).taps_TXD
    assert stage.embed is not None
    assert torch.equal(taps[:, 0], stage.embed(torch.tensor(ids)))
    seen = {layer: _sum_after(ids, layer) for layer in (0, 3)}
    assert torch.equal(taps[:, 1], seen[0])
    assert torch.equal(taps[:, 2], seen[3])


def _sum_after(ids: list[int], layer: int) -> Tensor:
    stage = solo_stage(NANO, "float64", taps=(layer,))
    pools = Pools(stage, 1, len(ids))
    return pools.chunk([(pools.requests[0], ids)]).taps_TXD[:, 0]


def test_03_requests_of_a_batch_never_share_a_ring_and_padding_has_its_own(
    model, witness, sent, truth
):
    group = DecodeGroup(model, max_rows=len(PROMPTS), max_len=LONGEST, depth=1)
    assert run_beside(group, witness, asks(sent, truth)) >= 2 * len(PROMPTS)


def test_04_a_handed_over_request_drafts_at_its_absolute_position(model, witness, sent, truth):
    group = DecodeGroup(model, max_rows=1, max_len=LONGEST, depth=1)
    [request] = [group.submit(asks(sent, truth)[7])]
    group.open_rows([request])
    [table] = group.tables()
    ids = [*PROMPTS[7], truth["greedy"][7][0]]
    assert table.base_R[1] == len(PROMPTS[7])
    assert table.drafts_RK[1].tolist() == witness.drafts(ids)


def test_06_rings_are_as_many_as_state_slots_whatever_a_step_is_padded_to(model):
    for rows in (1, 3, 13):
        group = DecodeGroup(model, max_rows=rows, max_len=LONGEST, depth=2)
        [storage] = group.storages
        field = storage.layout.field("draft")
        assert field is not None
        assert storage.pools["draft"].shape[0] == field.columns * group.config.cache.state_slots
        assert group.config.cache.state_slots > rows


def test_07_rows_are_not_overwritten_before_they_leave_the_window(model, witness, sent, truth):
    """The longest prompt fills the ring from the first step on; every step writes a whole group behind it."""
    group = DecodeGroup(model, max_rows=1, max_len=LONGEST, depth=1)
    assert len(PROMPTS[7]) + N_TOKENS > WINDOW + 2 * (K + 1)
    assert run_beside(group, witness, [asks(sent, truth)[7]]) >= 2


@pytest.mark.parametrize("rule", ["greedy", "seeded"])
def test_08_positions_do_not_drift_over_rows_that_end_and_come_back(model, sent, truth, rule):
    """What a step in flight did to a row that is gone leaves nothing behind for the next one, nor padding for later."""
    runner = partial(PassThrough, (4,))
    group = DecodeGroup(model, max_rows=2, max_len=LONGEST, depth=2, runner=runner)
    asked = [replace(ask, leaves_after=2) for ask in asks(sent, truth, rule)[3:7]]
    answers = group.play(asked)
    assert answers == truth[rule][3:7]
    [table] = group.tables()
    assert int(table.base_R[0]) == 0, "the dummy row moved"


def test_09_a_rank_without_keys_contributes_nothing_rather_than_nan(spread, sent, truth):
    """One token in the caches of four ranks whose pools are full of NaN."""
    group = DecodeGroup(spread, max_rows=2, max_len=LONGEST, depth=1)
    assert group.play(asks(sent, truth)[:2]) == truth["greedy"][:2]


def test_10_ranks_never_draw_for_themselves(spread, sent, truth):
    group = DecodeGroup(spread, max_rows=3, max_len=LONGEST, depth=1)
    requests = [group.submit(ask) for ask in asks(sent, truth, "seeded")[:3]]
    while group.scheduler.open_requests():
        group.step(requests)
        first, *others = group.tables()
        for table in others:
            for name in ("base_R", "anchor_R", "drafts_RK", "read_column_R"):
                assert torch.equal(getattr(table, name), getattr(first, name)), name


def test_12_padding_never_reaches_a_lookup_with_an_id_outside_the_vocabulary(folder, truth):
    stage_taps = DraftSpec.from_folder(folder("mla"))
    stage = solo_stage(NANO, "float64", taps=stage_taps.taps, tap_stream=stage_taps.tap_stream)
    engine = LocalEngine(
        stage, 3, LONGEST, drafter=folder("mla"), draft_tokens=K, window=WINDOW, buckets=(16,)
    )
    answers = engine.generate(PROMPTS[:3], N_TOKENS, [GREEDY] * 3)
    assert [a.ids for a in answers] == truth["greedy"][:3]
    for ids in (engine.table.anchor_R, engine.table.drafts_RK):
        assert 0 <= int(ids.min()) <= int(ids.max()) < SPEC.vocab_size


def test_15_requests_with_different_filters_are_judged_in_one_group(model, sent, truth):
    """Greedy, top-p, top-k, min-p and a bias side by side draw what each draws alone."""
    kinds = [
        GREEDY,
        SamplingParams(temperature=0.8, top_p=0.6, seed=1),
        SamplingParams(temperature=1.2, top_k=5, seed=2),
        SamplingParams(temperature=0.9, min_p=0.1, seed=3),
        SamplingParams(temperature=0.7, seed=4, logit_bias={3: 4.0}),
    ]
    plain = LocalEngine(solo_stage(NANO, "float64"), len(kinds), LONGEST)
    wanted = [a.ids for a in plain.generate(PROMPTS[: len(kinds)], N_TOKENS, kinds)]
    group = DecodeGroup(model, max_rows=len(kinds), max_len=LONGEST, depth=2)
    asked = [
        Ask(PROMPTS[i], sent[i], TokenEvent(wanted[i][0]), params, N_TOKENS)
        for i, params in enumerate(kinds)
    ]
    assert group.play(asked) == wanted


@pytest.mark.parametrize("more", [0, 5, 64])
def test_16_the_hosts_bound_is_never_taken_for_a_position(spread, sent, truth, more):
    group = DecodeGroup(spread, max_rows=2, max_len=LONGEST, depth=2, too_high=more)
    assert group.play(asks(sent, truth)[5:7]) == truth["greedy"][5:7]


def test_17_a_drafter_without_an_embedding_uses_the_targets_and_a_copy_is_not_loaded(
    flavour, folder, witness, tmp_path
):
    """The published K3.1 drafter ships none; K3's ships a copy, here a poisoned one."""
    copied = tmp_path / "copied"
    copied.mkdir()
    (copied / "config.json").write_text((folder(flavour) / "config.json").read_text())
    tensors = load_file(folder(flavour) / "model.safetensors")
    assert not any("embed_tokens" in name for name in tensors)
    shape = (SPEC.vocab_size, SPEC.hidden_size)
    save_file(
        tensors | {"embed_tokens.weight": torch.full(shape, float("nan"))},
        copied / "model.safetensors",
    )
    assert Witness(copied).drafts(PROMPTS[6]) == witness.drafts(PROMPTS[6])


def test_20_acceptance_is_measured_on_natural_questions_only():
    with pytest.raises(K3Error, match="random"):
        choose("random")


def test_a_request_on_a_used_ring_reads_nothing_of_its_predecessor(model, witness, sent, truth):
    """One row, one ring: a warm request, then a cold one whose rows never came."""
    group = DecodeGroup(model, max_rows=1, max_len=LONGEST, depth=1)
    run_beside(group, witness, [asks(sent, truth)[7]])
    assert run_beside(group, witness, [cold(asks(sent, truth)[4])], is_cold=True) >= 2


def test_warm_up_leaves_no_row_and_no_context_behind(model):
    """The dummy row runs through every kernel; rings, bases and starts are as before."""
    group = DecodeGroup(model, max_rows=3, max_len=LONGEST, depth=2)
    fresh = [pool.clone() for pool in (s.pools["draft"] for s in group.storages)]
    before = [table.base_R.clone() for table in group.tables()]
    for rank in group.ranks:
        rank.warm_up()
    for table, base in zip(group.tables(), before, strict=True):
        assert torch.equal(table.base_R, base)
        assert int(table.draft_start_R.min()) > FAR, "a row that nobody opened has context"
    for storage, pool in zip(group.storages, fresh, strict=True):
        places = storage.layout.field("draft").columns
        now = storage.pools["draft"]
        assert torch.equal(now[places:].nan_to_num(7.0), pool[places:].nan_to_num(7.0))
        assert now[places:].isnan().all(), "a ring that nobody got was written"
