"""Verify steps through the row table against a one-process forward of the whole sequence, in float64."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from decode_svc.ledger import Ledger
from decode_svc.rank.graphs import Eager
from decode_svc.rank.rows import RowTable
from decode_svc.rank.step import VerifyStep, apply_rows
from k3.device import CpuDevice
from k3.model.k3 import Stage
from k3.model.registry import open_stage
from k3.parallel.mesh import Mesh
from k3.rpc.convert import logprobs_to_proto, sampling_to_proto, stop_to_proto, token_to_proto
from k3.sampling import RowSampling, TokenCounts, sample
from k3.types import LogprobParams, SamplingParams, StopParams, TokenEvent
from k3.v1 import plan_pb2
from tests.model_runner import CPU, OPS, Pools, solo_stage
from tests.thread_group import mesh_groups, run_group

pytestmark = pytest.mark.dspark

NANO = Path(__file__).parents[3] / "golden" / "k3"
P = 4
MAX_TOKENS = 48
GREEDY = SamplingParams(temperature=0.0)
PROMPTS = [[5, 9, 2], [1], [7, 3, 3, 8, 40, 11, 2, 6, 30, 4, 4, 9, 1]]


@pytest.fixture(scope="module")
def stage() -> Stage:
    return solo_stage(NANO, "float64")


class Reference:
    """The same generation with no cache at all: every token from a forward of everything before it."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        key = tuple(ids)
        if key not in self._known:
            pools = Pools(self.stage, 1, MAX_TOKENS, P)
            self._known[key] = pools.prefill(pools.requests[0], ids, len(ids))[-1:]
        return self._known[key]

    def generate(
        self,
        prompt: Sequence[int],
        n: int,
        params: SamplingParams,
        end_ids: tuple[int, ...] = (),
        logprobs: LogprobParams | None = None,
    ) -> list[TokenEvent]:
        row = RowSampling(params, end_ids, logprobs or LogprobParams(), len(prompt))
        ids, events = list(prompt), list[TokenEvent]()
        for _ in range(n):
            counts = None
            if params.needs_counts:
                counts = TokenCounts(
                    self.stage.spec.vocab_size, prompt_ids=prompt, output_ids=ids[len(prompt) :]
                )
            [event] = sample(self.logits(ids), [row], [len(ids)], [counts])
            ids.append(event.id)
            events.append(event)
        return events


class Decode:
    """A rank's row table and step over pools that a chunked prefill has filled."""

    def __init__(
        self, stage: Stage, drafts: int = 0, buckets: tuple[int, ...] = (), rows: int = 4
    ) -> None:
        self.pools = Pools(stage, len(PROMPTS), MAX_TOKENS, P, columns=1 + drafts, seed=3)
        width = self.pools.requests[0].pages.shape[0]
        cpu = torch.device("cpu")
        self.drafts = drafts
        self.table = RowTable(rows, width, drafts, stage.spec.vocab_size, cpu)
        self.step = VerifyStep(
            stage,
            self.pools.caches,
            self.table,
            Ledger(P),
            Eager(buckets),
            CpuDevice(1),
            max_rows=rows,
            group=1 + drafts,
            depth=1,
        )
        self.out: dict[int, list[TokenEvent]] = {}

    def open(
        self,
        row: int,
        which: int,
        first: TokenEvent,
        params: SamplingParams = GREEDY,
        *,
        end_ids: tuple[int, ...] = (),
        logprobs: LogprobParams | None = None,
        epoch: int = 1,
        draft_len: int | None = None,
    ) -> None:
        prompt, place = PROMPTS[which], self.pools.requests[which]
        self.pools.prefill(place, prompt, 5)
        opened = plan_pb2.OpenRow(
            row=row,
            epoch=epoch,
            base=len(prompt),
            anchor=first.id,
            pages=place.pages.tolist(),
            state_slot=place.slot,
            sampling=sampling_to_proto(params),
            stop=stop_to_proto(StopParams(99, stop_token_ids=end_ids)),
            logprobs=logprobs_to_proto(logprobs or LogprobParams()),
            draft_len=self.drafts if draft_len is None else draft_len,
            prompt_ids=prompt if params.needs_prompt_ids else (),
            output_ids=[first.id],
        )
        apply_rows(self.table, plan_pb2.StepPlan(open_rows=[opened]))
        self.out[row] = [first]

    def run(self, rows: Sequence[int], drafts: dict[int, list[int]] | None = None) -> None:
        for row, ids in (drafts or {}).items():
            self.table.drafts_RK[row] = torch.tensor(ids)
        outcome = self.step.launch(rows, MAX_TOKENS - 1 - self.drafts)
        for row, events in zip(rows, outcome.answers(), strict=True):
            self.out[row] += events

    def ids(self, row: int) -> list[int]:
        return [event.id for event in self.out[row]]


@pytest.fixture(scope="module")
def reference(stage: Stage) -> Reference:
    return Reference(stage)


def ids(events: Sequence[TokenEvent]) -> list[int]:
    return [event.id for event in events]


@pytest.mark.parametrize("buckets", [(), (2, 4)], ids=["exact", "padded"])
def test_rows_of_different_ages_give_the_reference_tokens(
    stage: Stage, reference: Reference, buckets: tuple[int, ...]
) -> None:
    wanted = [reference.generate(prompt, 12, GREEDY) for prompt in PROMPTS]
    decode = Decode(stage, buckets=buckets)
    decode.open(3, 0, wanted[0][0])
    for _ in range(3):
        decode.run([3])
    decode.open(1, 1, wanted[1][0])
    decode.open(2, 2, wanted[2][0])
    for _ in range(8):
        decode.run([3, 1, 2])
    for row, which in ((3, 0), (1, 1), (2, 2)):
        n = len(decode.ids(row))
        assert decode.ids(row) == ids(wanted[which])[:n]
        assert n >= 9


@pytest.mark.parametrize(
    "third, logprobs",
    [
        (GREEDY, LogprobParams(True, 2)),
        (SamplingParams(temperature=0.0, logit_bias={4: 9.0}), None),
    ],
    ids=["log probabilities", "bias"],
)
def test_ranks_that_share_the_vocabulary_give_the_reference_tokens(
    reference: Reference, third: SamplingParams, logprobs: LogprobParams | None
) -> None:
    """Plain steps, and one with a row for which logits are needed."""
    mesh, params, asked = Mesh(tp=2), [GREEDY, GREEDY, third], [None, None, logprobs]
    wanted = [reference.generate(prompt, 12, p) for prompt, p in zip(PROMPTS, params, strict=True)]
    groups = mesh_groups(mesh)

    def body(rank: int) -> list[list[int]]:
        place = mesh.place(rank)
        stage = open_stage(NANO, place, groups[rank], OPS, dtype="float64", device=CPU)
        decode = Decode(stage, drafts=2)
        for i, p in enumerate(params):
            decode.open(i + 1, i, wanted[i][0], p, logprobs=asked[i])
        for rows in ([1, 2], [1, 2, 3], [2, 1]):
            right = {row: ids(wanted[row - 1])[len(decode.ids(row)) :][:2] for row in rows}
            right[1][1] = 0
            decode.run(rows, right)
        return [decode.ids(row) for row in (1, 2, 3)]

    for found in run_group(mesh.size, body):
        assert [len(got) for got in found] == [7, 10, 4]
        assert found == [ids(want)[: len(got)] for want, got in zip(wanted, found, strict=True)]


def test_seeded_rows_with_every_filter_give_the_reference_tokens(
    stage: Stage, reference: Reference
) -> None:
    params = [
        SamplingParams(seed=7, temperature=1.3, top_p=0.9),
        SamplingParams(seed=-3, sample_index=2, top_k=7, min_p=0.01, logit_bias={4: 2.0}),
        SamplingParams(
            seed=1,
            repetition_penalty=1.7,
            presence_penalty=0.5,
            frequency_penalty=0.25,
            min_tokens=5,
        ),
    ]
    ends = tuple(range(20))
    wanted = [
        reference.generate(prompt, 10, p, ends) for prompt, p in zip(PROMPTS, params, strict=True)
    ]
    decode = Decode(stage)
    for which, p in enumerate(params):
        decode.open(which + 1, which, wanted[which][0], p, end_ids=ends)
    for _ in range(9):
        decode.run([2, 3, 1])
    for which in range(3):
        assert decode.ids(which + 1) == ids(wanted[which])


def test_logprobs_equal_those_of_the_reference(stage: Stage, reference: Reference) -> None:
    wants = LogprobParams(True, 4)
    wanted = reference.generate(PROMPTS[2], 6, GREEDY, logprobs=wants)
    decode = Decode(stage)
    decode.open(1, 2, wanted[0], logprobs=wants)
    decode.open(2, 0, reference.generate(PROMPTS[0], 1, GREEDY)[0])
    for _ in range(5):
        decode.run([2, 1])
    for found, event in zip(decode.out[1], wanted, strict=True):
        assert found.id == event.id
        assert found.logprob == pytest.approx(event.logprob, abs=1e-9)
        assert [i for i, _ in found.top] == [i for i, _ in event.top]
        assert token_to_proto(found).id == event.id
    assert all(event.logprob is None for event in decode.out[2][1:])


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(seed=12, top_p=0.95),
        SamplingParams(
            seed=4,
            temperature=1.2,
            top_k=40,
            min_p=0.001,
            presence_penalty=0.6,
            frequency_penalty=0.8,
            repetition_penalty=1.3,
            logit_bias={3: 4.0, 17: 3.0},
        ),
    ],
    ids=["greedy", "seeded", "penalised"],
)
def test_tokens_do_not_depend_on_drafts(
    stage: Stage, reference: Reference, params: SamplingParams
) -> None:
    """Right, wrong and half-right drafts, groups over page ends: same tokens, and right drafts are accepted."""
    wanted = [ids(reference.generate(prompt, 20, params)) for prompt in PROMPTS]
    decode = Decode(stage, drafts=3)
    for which in range(3):
        decode.open(which + 1, which, TokenEvent(wanted[which][0]), params)
    taken: list[list[int]] = [[], [], []]
    for step in range(5):
        drafts: dict[int, list[int]] = {}
        for which in range(3):
            at = len(decode.ids(which + 1))
            right = wanted[which][at : at + 3]
            n_right = (step + which) % 4  # the first n are right, the next one is wrong
            drafts[which + 1] = [*right[:n_right], *((t + 1) % 50 for t in right[n_right:])]
            taken[which].append(n_right)
        before = [len(decode.ids(row)) for row in (1, 2, 3)]
        decode.run([1, 2, 3], drafts)
        gained = [len(decode.ids(row)) - n for row, n in zip((1, 2, 3), before, strict=True)]
        assert gained == [taken[which][-1] + 1 for which in range(3)]
    for which in range(3):
        assert decode.ids(which + 1) == wanted[which][: len(decode.ids(which + 1))]


def test_a_row_without_drafts_rides_in_a_wide_group(stage: Stage, reference: Reference) -> None:
    """Its padded positions are not written and count nothing."""
    params = SamplingParams(temperature=0.0, frequency_penalty=1.5)
    wanted = [
        ids(reference.generate(PROMPTS[0], 6, params)),
        ids(reference.generate(PROMPTS[2], 18, GREEDY)),
    ]
    decode = Decode(stage, drafts=2)
    decode.open(1, 0, TokenEvent(wanted[0][0]), params, draft_len=0)
    decode.open(2, 2, TokenEvent(wanted[1][0]))
    for _ in range(5):
        at = len(decode.ids(2))
        decode.run([1, 2], {1: [1, 1], 2: wanted[1][at : at + 2]})
    assert decode.ids(1) == wanted[0]
    assert decode.ids(2) == wanted[1][:16]  # every draft accepted


def test_a_reused_row_carries_nothing_over(stage: Stage, reference: Reference) -> None:
    penalised = SamplingParams(temperature=0.0, presence_penalty=2.0)
    first = reference.generate(PROMPTS[0], 4, penalised)
    second = reference.generate(PROMPTS[2], 4, GREEDY)
    decode = Decode(stage)
    decode.open(1, 0, first[0], penalised)
    for _ in range(3):
        decode.run([1])
    assert decode.ids(1) == ids(first)
    apply_rows(decode.table, plan_pb2.StepPlan(close_rows=[plan_pb2.CloseRow(row=1, epoch=1)]))
    decode.open(1, 2, second[0], epoch=2)
    for _ in range(3):
        decode.run([1])
    assert decode.ids(1) == ids(second)


def test_a_late_close_does_not_touch_the_row_of_a_newer_request(stage: Stage) -> None:
    decode = Decode(stage)
    decode.open(1, 0, TokenEvent(4), epoch=2)
    stale = plan_pb2.StepPlan(close_rows=[plan_pb2.CloseRow(row=1, epoch=1)])
    apply_rows(decode.table, stale)
    current = plan_pb2.StepPlan(verify_rows=[plan_pb2.VerifyRow(row=1, epoch=2)])
    apply_rows(decode.table, current)
    with pytest.raises(ValueError, match="holds epoch 2"):
        apply_rows(
            decode.table, plan_pb2.StepPlan(verify_rows=[plan_pb2.VerifyRow(row=1, epoch=1)])
        )


def test_rows_outside_the_table_are_refused(stage: Stage) -> None:
    decode = Decode(stage)
    for row, n_pages in ((0, 1), (9, 1), (1, 99)):
        opened = plan_pb2.OpenRow(row=row, pages=[0] * n_pages)
        with pytest.raises(ValueError, match="front and rank disagree"):
            apply_rows(decode.table, plan_pb2.StepPlan(open_rows=[opened]))


def test_warm_up_touches_no_page_and_no_request(stage: Stage) -> None:
    decode = Decode(stage, buckets=(4,))
    before = {name: pool.clone() for name, pool in decode.pools.storage.pools.items()}
    decode.step.warm_up(4)
    for name, pool in decode.pools.storage.pools.items():
        first = 1 if name in ("kda", "conv") else 0  # slot 0 is the dummy
        assert torch.equal(pool[first:].nan_to_num(7.0), before[name][first:].nan_to_num(7.0)), name
    assert decode.table.base_R.tolist() == [0] * 5
