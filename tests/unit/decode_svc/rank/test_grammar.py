"""Rows that a grammar constrains: speculation gives the tokens of plain constrained decoding (float64)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from decode_svc.rank.grammar import Masks
from decode_svc.rank.graphs import PassThrough
from decode_svc.rank.outcome import Outcome
from k3.edits import unpack_mask
from k3.model.k3 import Stage
from k3.model.spec import K3Spec
from k3.types import SamplingParams
from k3.v1 import plan_pb2
from tests.drafters import LocalEngine
from tests.model_runner import solo_stage

pytestmark = pytest.mark.dspark

NANO = Path(__file__).parents[3] / "golden" / "k3"
V = K3Spec.from_folder(NANO).vocab_size
PROMPTS = [[5, 9, 2], [1], [7, 3, 3, 8, 40, 11]]
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.1, top_p=0.9, seed=4, presence_penalty=0.4),
    SamplingParams(temperature=0.9, seed=8),  # this one stays free
]
END, N_TOKENS, DRAFTS = 11, 14, 3


class Residues:
    """A token may follow another when its residue is the next one; after `n` tokens only END may."""

    def __init__(self, last: int, n: int) -> None:
        self.last, self.left = last, n
        self.asked: list[tuple[int, ...]] = []

    def _after(self, last: int, left: int) -> list[int]:
        if left <= 0:
            return [END]
        return [i for i in range(V) if i % 5 == (last + 1) % 5 and i != END]

    def accept(self, token: int) -> None:
        assert token in self._after(self.last, self.left)
        self.last, self.left = token, self.left - 1

    def allowed(self, ahead: Sequence[int]) -> Sequence[int]:
        self.asked.append(tuple(ahead))
        last, left = self.last, self.left
        for token in ahead:
            assert token in self._after(last, left), "asked beyond a token that is forbidden"
            last, left = token, left - 1
        return self._after(last, left)


@pytest.fixture(scope="module")
def stage() -> Stage:
    return solo_stage(NANO, "float64")


class Constrained:
    """Three requests, two of them constrained, all opened; drafts are set by hand."""

    def __init__(
        self, stage: Stage, drafts: int, runner: PassThrough | None = None, depth: int = 1
    ) -> None:
        self.engine = LocalEngine(stage, 3, 48, draft_tokens=drafts, runner=runner, depth=depth)
        self.out = [a.ids for a in self.engine.generate(PROMPTS, 1, PARAMS)]
        self.grammars = [Residues(self.out[i][0], 9 + i) for i in range(2)]
        for i, grammar in enumerate(self.grammars):
            self.engine.table.constrain(i + 1, 1, grammar)

    def run(self, drafts: Sequence[Sequence[int]] = ((), (), ())) -> list[int]:
        """One step; returns how many tokens each gained."""
        for i, ids in enumerate(drafts):
            self.engine.table.drafts_RK[i + 1] = torch.tensor(ids, dtype=torch.int64)
        answers = self.engine.step.launch([1, 2, 3], 40).answers()
        for ids, events in zip(self.out, answers, strict=True):
            ids += [event.id for event in events]
        return [len(events) for events in answers]


@pytest.fixture(scope="module")
def plain(stage: Stage) -> list[list[int]]:
    """One token at a time."""
    decode = Constrained(stage, 0)
    for _ in range(N_TOKENS):
        decode.run()
    return decode.out


def test_plain_constrained_decoding_takes_the_best_token_that_is_allowed(
    stage: Stage, plain: list[list[int]]
) -> None:
    engine = LocalEngine(stage, 1, 48)
    [place] = engine.pools.requests
    logits = engine.pools.prefill(place, [*PROMPTS[0], *plain[0]], 5)[len(PROMPTS[0]) :]
    grammar, changed = Residues(plain[0][0], 9), 0
    for row, token in zip(logits, plain[0][1:], strict=False):
        allowed = list(grammar.allowed(()))
        assert token == allowed[int(row[allowed].argmax())]
        changed += token != int(row.argmax())
        grammar.accept(token)
    assert changed > 3, "the grammar forbade nothing"
    assert plain[0][10:] == [END] * (N_TOKENS - 9)


@pytest.mark.parametrize("runner", [None, PassThrough((4,))], ids=["eager", "pass-through"])
def test_drafts_change_no_token_of_constrained_rows(
    stage: Stage, plain: list[list[int]], runner: PassThrough | None
) -> None:
    """Right drafts, forbidden ones, and ones behind the grammar's end, at every place of the group."""
    decode = Constrained(stage, DRAFTS, runner)
    for step in range(8):
        drafts: list[list[int]] = []
        wanted: list[int] = []
        for i in range(3):
            at = len(decode.out[i])
            right = [*plain[i], *[END] * 30][at : at + DRAFTS]
            n_right = (step + i) % (DRAFTS + 1)
            drafts.append([*right[:n_right], *((t + 2) % V for t in right[n_right:])])
            wanted.append(n_right + 1)
        gained = decode.run(drafts)
        assert gained[:2] == wanted[:2]
        if len(decode.out[2]) <= N_TOKENS:
            assert gained[2] == wanted[2]
    for found, expected in zip(decode.out, plain, strict=True):
        n = min(len(found), len(expected))
        assert found[:n] == expected[:n]
        assert n > N_TOKENS - 2
    assert {len(ahead) for ahead in decode.grammars[0].asked} == set(range(DRAFTS + 1))


def test_a_grammar_hears_of_steps_in_flight_before_it_limits_the_next_one(
    stage: Stage, plain: list[list[int]]
) -> None:
    decode, in_flight = Constrained(stage, DRAFTS, depth=2), deque[Outcome]()
    while min(map(len, decode.out)) < N_TOKENS:
        in_flight.append(decode.engine.step.launch([1, 2, 3], 40))
        if len(in_flight) == 2:
            for ids, tokens in zip(decode.out, in_flight.popleft().tokens(), strict=True):
                ids += tokens
    for found, expected in zip(decode.out, plain, strict=True):
        assert found[:N_TOKENS] == expected[:N_TOKENS]


def test_rows_behind_a_forbidden_draft_stay_open() -> None:
    masks = Masks(3, 3, V, torch.device("cpu"))
    grammar = Residues(4, 5)
    masks.fill([None, grammar], [[1, 2], [10, 12]])  # 10 may follow 4, 12 may not follow 10
    bits = unpack_mask(masks.words_BGW, V)
    assert bits[0].all()
    assert bits[1, 0].nonzero().flatten().tolist() == [i for i in range(V) if i % 5 == 0]
    assert bits[1, 1].nonzero().flatten().tolist() == [
        i for i in range(V) if i % 5 == 1 and i != END
    ]
    assert bits[1, 2].all()
    masks.fill([None], [[]])
    assert unpack_mask(masks.words_BGW, V)[0].all()


def test_a_grammar_outranks_the_ban_of_ends(stage: Stage) -> None:
    engine = LocalEngine(stage, 1, 48)
    engine.generate([[3, 4]], 1, [SamplingParams(temperature=0.0, min_tokens=9)], end_ids=(END,))
    engine.table.constrain(1, 1, Residues(3, 0))
    assert [event.id for event in engine.step.launch([1], 40).answers()[0]] == [END]


def test_a_grammar_on_the_wire_is_refused_by_a_rank_that_cannot_read_it(stage: Stage) -> None:
    engine = LocalEngine(stage, 1, 48)
    with pytest.raises(ValueError, match="no compiler of this version"):
        engine.table.open(plan_pb2.OpenRow(row=1, epoch=1, grammar=b"x"))


def test_a_newer_request_in_the_row_is_free(stage: Stage) -> None:
    decode = Constrained(stage, 0)
    free = LocalEngine(stage, 3, 48).generate(PROMPTS, 3, PARAMS)
    place = decode.engine.pools.requests[0]
    place.length, place.ids = 0, []
    [answer] = decode.engine.generate(PROMPTS[:1], 3, PARAMS[:1])
    assert answer.ids == free[0].ids
