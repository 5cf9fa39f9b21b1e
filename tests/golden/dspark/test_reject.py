"""Acceptance rules against recorded rejections, and their losslessness by exact enumeration.

`match` is the engine's rule; greedy cases pin it too. Tolerance: the README's 1e-4.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from k3.acceptance import Rule, accept, accept_by_block, accept_by_token
from tests.compare import assert_close

pytestmark = pytest.mark.dspark

HERE = Path(__file__).parent
CASES: list[str] = json.loads((HERE / "reject.cases.json").read_text())


class Judged(NamedTuple):
    n_accepted: int
    final_V: Tensor


def judge(rule: Rule, p_GV: Tensor, q_KV: Tensor, drafts_K: Tensor, u_K: Tensor) -> Judged:
    """A batch of one, in a group with two drafts more than are real: padding never counts."""
    k, v = q_KV.shape
    p = torch.cat((p_GV, torch.full((2, v), torch.nan)))
    q = torch.cat((q_KV, torch.full((2, v), torch.nan)))
    drafts, u = torch.cat((drafts_K, drafts_K.new_zeros(2))), torch.cat((u_K, u_K.new_zeros(2)))
    accepted, final = rule(p[None], q[None], drafts[None], torch.tensor([k]), u[None])
    return Judged(int(accepted), final[0])


@pytest.fixture(scope="module")
def recorded() -> dict[str, Tensor]:
    return load_file(HERE / "reject.safetensors")


@pytest.mark.parametrize("case", [case for case in CASES if case != "stop_inside"])
def test_the_token_rule_accepts_what_was_recorded_and_leaves_the_same_distribution(recorded, case):
    def get(name: str) -> Tensor:
        return recorded[f"{case}.{name}"]

    drafts = get("verify_tokens")[1:]
    k = len(drafts)
    q = get("draft_probs")[:k] if k else torch.zeros(0, get("target_probs").shape[1])
    verdict = judge(accept_by_token, get("target_probs"), q, drafts, get("uniforms")[:k])
    assert verdict.n_accepted == int(get("num_accepted"))
    assert_close(verdict.final_V, get("final_distribution"), 1e-4, case)


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("greedy")])
def test_the_match_rule_agrees_where_everything_is_greedy(recorded, case):
    drawn = recorded[f"{case}.target_logits"].argmax(-1)[None]
    drafts = recorded[f"{case}.verify_tokens"][1:][None]
    n_accepted = accept(drawn, drafts, torch.tensor([drafts.shape[1]]))
    assert n_accepted.tolist() == recorded[f"{case}.num_accepted"].tolist()
    final = recorded[f"{case}.final_distribution"]
    assert int(final.argmax()) == int(drawn[0, int(n_accepted)])


V, K = 3, 2


class World:
    """Target and drafter over `V` tokens, each conditioned on everything before."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.p: dict[tuple[int, ...], Tensor] = {}
        self.q: dict[tuple[int, ...], Tensor] = {}
        for n in range(K + 2):
            for prefix in itertools.product(range(V), repeat=n):
                self.p[prefix], self.q[prefix] = self._draw(), self._draw()

    def _draw(self) -> Tensor:
        return (2 * torch.randn(V, generator=self.generator, dtype=torch.float64)).softmax(-1)


def thresholds(rule: Rule, p: Tensor, q: Tensor, drafts: Tensor) -> list[float]:
    """Largest uniform with which position i alone lets draft i through, found by bisection."""
    found: list[float] = []
    for i in range(K):
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            u = torch.full((K,), 2.0, dtype=torch.float64)
            u[: i if rule is accept_by_token else 0] = -1.0  # the token rule needs those before
            u[i] = middle
            low, high = (
                (middle, high) if judge(rule, p, q, drafts, u).n_accepted > i else (low, middle)
            )
        found.append(low)
    return found


@pytest.mark.parametrize("rule", [accept_by_token, accept_by_block])
@pytest.mark.parametrize("seed", range(3))
def test_emitted_tokens_have_the_law_of_the_target(rule, seed):
    """Exact: all drafts, all accepted counts, all final tokens; then K + 1 tokens are completed by the target."""
    world = World(seed)
    law: dict[tuple[int, ...], float] = {}
    lengths = 0.0
    for drafts in itertools.product(range(V), repeat=K):
        weight = 1.0
        for i in range(K):
            weight *= float(world.q[drafts[:i]][drafts[i]])
        p = torch.stack([world.p[drafts[:i]] for i in range(K + 1)])
        q = torch.stack([world.q[drafts[:i]] for i in range(K)])
        h = thresholds(rule, p, q, torch.tensor(drafts))
        for passes in itertools.product((True, False), repeat=K):
            chance = weight
            u = torch.empty(K, dtype=torch.float64)
            for i, is_through in enumerate(passes):
                chance *= h[i] if is_through else 1 - h[i]
                u[i] = h[i] * 0.5 if is_through else h[i] + (1 - h[i]) * 0.5
            if chance < 1e-15:
                continue
            verdict = judge(rule, p, q, torch.tensor(drafts), u)
            lengths += chance * verdict.n_accepted
            for token in range(V):
                start = (*drafts[: verdict.n_accepted], token)
                _complete(world, law, start, chance * float(verdict.final_V[token]))
    for sequence in itertools.product(range(V), repeat=K + 1):
        wanted = 1.0
        for i, token in enumerate(sequence):
            wanted *= float(world.p[sequence[:i]][token])
        assert law[sequence] == pytest.approx(wanted, abs=1e-9)
    assert 0 < lengths < K


def _complete(
    world: World, law: dict[tuple[int, ...], float], start: tuple[int, ...], chance: float
) -> None:
    """Spread `chance` over all continuations of `start` to K + 1 tokens, drawn from the target."""
    if len(start) == K + 1:
        law[start] = law.get(start, 0.0) + chance
        return
    for token in range(V):
        _complete(world, law, (*start, token), chance * float(world.p[start][token]))


@pytest.mark.parametrize("seed", range(3))
def test_the_block_rule_accepts_at_least_as_much_as_the_token_rule(seed):
    means: dict[str, float] = {}
    for rule in (accept_by_token, accept_by_block):
        world, mean = World(seed), 0.0
        for drafts in itertools.product(range(V), repeat=K):
            weight = 1.0
            for i in range(K):
                weight *= float(world.q[drafts[:i]][drafts[i]])
            p = torch.stack([world.p[drafts[:i]] for i in range(K + 1)])
            q = torch.stack([world.q[drafts[:i]] for i in range(K)])
            h = thresholds(rule, p, q, torch.tensor(drafts))
            expected = (
                h[0] + h[0] * h[1] if rule is accept_by_token else h[0] * (1 - h[1]) + 2 * h[1]
            )
            mean += weight * expected
        means[rule.__name__] = mean
    assert means["accept_by_block"] >= means["accept_by_token"] - 1e-9
