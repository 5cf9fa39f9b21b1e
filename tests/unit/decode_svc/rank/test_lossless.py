"""The rules that weigh drafts leave the target's law alone: rollouts through real steps against the exact law.

Target and drafter are random models, both bent towards the same few tokens, so that drafts are accepted and rejected at
every place and every sequence of tokens has a probability that can be computed. Everything is seeded: a run that passes
passes always. A right engine fails with a probability below 1e-4.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from decode_svc.rank.step import apply_rows
from k3.edits import TokenCounts
from k3.model.dspark_spec import DraftSpec
from k3.model.k3 import Stage
from k3.model.spec import K3Spec
from k3.rpc.convert import sampling_to_proto, stop_to_proto
from k3.sampling import Params, Purpose, Recipe, RowSampling
from k3.types import SamplingParams, StopParams
from k3.v1 import plan_pb2
from tests.drafters import LocalEngine, random_drafter
from tests.model_runner import Pools, solo_stage

pytestmark = pytest.mark.dspark

NANO = Path(__file__).parents[3] / "golden" / "k3"
SPEC = K3Spec.from_folder(NANO)
LIKELY: tuple[int, ...] = (3, 40, 200)
PROMPT, ANCHOR = [7, 1, 30], 9
LENGTH, DRAFTS = 3, 3
ROWS, ROUNDS = 128, 5
PARAMS = SamplingParams(
    temperature=1.4, top_p=0.97, logit_bias=dict.fromkeys(LIKELY, 60.0), frequency_penalty=0.6
)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its sequential head favours the likely tokens after any token, one of them more than the target does."""
    folder = random_drafter(tmp_path_factory.mktemp("d") / "d", SPEC, "mla", 5, block=DRAFTS)
    tensors = load_file(folder / "model.safetensors")
    tensors["markov_head.markov_w1.weight"][:, 0] = 1.0
    tensors["markov_head.markov_w2.weight"][list(LIKELY), 0] += torch.tensor([61.5, 60.0, 59.5])
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def stage(drafter: Path) -> Stage:
    return solo_stage(NANO, "float64", taps=DraftSpec.from_folder(drafter).taps)


@pytest.fixture(scope="module")
def law(stage: Stage) -> dict[tuple[int, ...], float]:
    """Probability of every sequence of tokens after the anchor, from forwards of whole sequences."""
    found = {(): 1.0}
    for _ in range(LENGTH):
        longer: dict[tuple[int, ...], float] = {}
        for prefix, chance in found.items():
            p = _next(stage, prefix)
            for token in LIKELY:
                longer[(*prefix, token)] = chance * float(p[token])
        found = longer
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-12)
    return found


def _next(stage: Stage, prefix: tuple[int, ...]) -> Tensor:
    ids = [*PROMPT, ANCHOR, *prefix]
    pools = Pools(stage, 1, len(ids))
    logits = pools.prefill(pools.requests[0], ids, len(ids))[-1:, None]
    counts = TokenCounts(SPEC.vocab_size, output_ids=[ANCHOR, *prefix])
    recipe = Recipe.of([RowSampling(PARAMS)], [counts], vocab_size=SPEC.vocab_size)
    return recipe.probabilities(recipe.scores(logits, torch.tensor([[len(ids)]])))[0, 0]


class Rollouts:
    """Many requests of one prompt, told apart by their seeds; every round starts from the same caches."""

    def __init__(self, stage: Stage, drafter: Path, rule: str) -> None:
        self.engine = LocalEngine(
            stage, ROWS, 24, drafter=drafter, draft_tokens=DRAFTS, window=8, acceptance=rule
        )
        pools, ring = self.engine.pools, self.engine.ring
        assert ring is not None
        assert self.engine.drafter is not None
        output = pools.chunk([(place, PROMPT) for place in pools.requests])
        position = torch.arange(len(PROMPT)).repeat(ROWS)
        slot = torch.tensor([place.slot for place in pools.requests])
        slot = slot.repeat_interleave(len(PROMPT))
        rows = self.engine.drafter.context(output.taps_TXD, position)
        ring.write(rows, slot, position, torch.ones_like(slot, dtype=torch.bool))
        tails = pools.caches.tails.values()
        self.memory = [*pools.storage.pools.values(), *tails, ring.pool]
        self.start = [tensor.clone() for tensor in self.memory]
        self.accepted: list[int] = []

    def round(self, number: int) -> list[tuple[int, ...]]:
        for tensor, start in zip(self.memory, self.start, strict=True):
            tensor.copy_(start)
        plan = plan_pb2.StepPlan()
        for i, place in enumerate(self.engine.pools.requests):
            sampling = sampling_to_proto(PARAMS)
            sampling.seed = number * ROWS + i
            plan.open_rows.add(
                row=i + 1,
                epoch=number,
                base=len(PROMPT),
                anchor=ANCHOR,
                pages=place.pages.tolist(),
                state_slot=place.slot,
                draft_valid=True,
                sampling=sampling,
                stop=stop_to_proto(StopParams(99)),
                draft_len=DRAFTS,
                output_ids=[ANCHOR],
            )
        apply_rows(self.engine.table, plan)
        self.engine.step.open(range(1, ROWS + 1), len(PROMPT))
        out: dict[int, list[int]] = {row: [] for row in range(1, ROWS + 1)}
        while left := [row for row, ids in out.items() if len(ids) < LENGTH]:
            outcome = self.engine.step.launch(left, len(PROMPT) + 2 * LENGTH)
            for row, ids in zip(left, outcome.tokens(), strict=True):
                out[row] += ids
                self.accepted.append(len(ids) - 1)
        return [tuple(ids[:LENGTH]) for ids in out.values()]


@pytest.mark.parametrize("rule", ["token", "block"])
def test_rollouts_have_the_law_of_the_target(
    stage: Stage, drafter: Path, law: dict[tuple[int, ...], float], rule: str
) -> None:
    rollouts = Rollouts(stage, drafter, rule)
    counts = dict.fromkeys(itertools.product(LIKELY, repeat=LENGTH), 0)
    for number in range(ROUNDS):
        for sequence in rollouts.round(number):
            counts[sequence] += 1
    n = ROWS * ROUNDS
    live = [s for s, p in law.items() if p * n >= 5]
    rare = 1 - sum(law[s] for s in live)
    assert all(counts[s] == 0 for s, p in law.items() if p == 0.0)
    cells = [(counts[s], n * law[s]) for s in live]
    cells.append((n - sum(counts[s] for s in live), n * rare))
    chi2 = sum((seen - due) ** 2 / due for seen, due in cells if due > 0)
    freedom = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    p_value = float(torch.special.gammaincc(freedom, torch.tensor(chi2 / 2, dtype=torch.float64)))
    assert p_value > 1e-4, (chi2, len(cells), p_value)
    mean = sum(rollouts.accepted) / len(rollouts.accepted)
    assert 0.3 < mean < DRAFTS - 0.3, f"{mean}: drafts that are always kept or never prove nothing"


Number = tuple[int, int, Purpose, int | None]  # seed, position, purpose, slot


def watched(params: Params, used: Counter[Number]) -> Params:
    """The same numbers of the same requests; `used` counts each one that is asked for."""

    class Watched(Params):
        __slots__ = ()

        def select(self, rows_B: Tensor) -> Params:
            found = Params.select(self, rows_B)
            return Watched(found.reals, found.whole)

        def uniform(
            self, position_BG: Tensor, purpose: Purpose, slot_G: Tensor | None = None
        ) -> Tensor:
            slots = [None] * position_BG.shape[1] if slot_G is None else slot_G.tolist()
            for seed, positions in zip(
                self.whole[:, 0].tolist(), position_BG.tolist(), strict=True
            ):
                used.update((seed, p, purpose, s) for p, s in zip(positions, slots, strict=True))
            return Params.uniform(self, position_BG, purpose, slot_G)

    return Watched(params.reals, params.whole)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_no_random_number_is_used_twice(stage: Stage, drafter: Path, rule: str) -> None:
    """A position is drafted and judged again after a rejection, by a group of another base."""
    n = 4
    engine = LocalEngine(
        stage, n, 24, drafter=drafter, draft_tokens=DRAFTS, window=8, acceptance=rule
    )
    used: Counter[Number] = Counter()
    engine.table.params = watched(engine.table.params, used)
    how = [replace(PARAMS, seed=1 + i) for i in range(n)]
    answers = engine.generate([PROMPT] * n, 12, how)
    assert [number for number, times in used.items() if times > 1] == []
    steps = sum(len(answer.accepted) for answer in answers)
    judged = Counter(purpose for _seed, _position, purpose, _slot in used)
    assert judged[Purpose.ACCEPT] == DRAFTS * steps
    assert judged[Purpose.RESIDUAL] == steps
    assert judged[Purpose.DRAFT] == DRAFTS * (steps + n)
    assert min(min(answer.accepted) for answer in answers) < DRAFTS - 1, "no position came twice"
