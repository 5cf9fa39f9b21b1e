"""Acceptance rules with the engine's own random numbers, over many groups of many requests at once."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from k3.acceptance import RULES
from k3.sampling import Params, Purpose, RowSampling, pick
from k3.types import SamplingParams

pytestmark = pytest.mark.dspark

V, K, LENGTH, N = 3, 3, 4, 20_000


class Chains:
    """Target and drafter whose next token depends on the last one."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(2, V, V, generator=generator, dtype=torch.float64)
        self.p_VV, self.q_VV = logits.softmax(-1)

    def law(self, first: int) -> Tensor:
        """Probability of every sequence of LENGTH tokens after `first`, in lexical order."""
        chances: list[Tensor] = []
        for sequence in itertools.product(range(V), repeat=LENGTH):
            steps = itertools.pairwise((first, *sequence))
            chances.append(torch.stack([self.p_VV[a, b] for a, b in steps]).prod())
        return torch.stack(chances)


def rollouts(chains: Chains, rule: str, *, own_numbers: bool) -> tuple[Tensor, float]:
    """Sequences [N, LENGTH] after token 0, and the mean number of accepted drafts."""
    params = Params.of([RowSampling(SamplingParams(seed=i)) for i in range(N)], "cpu")
    slots = torch.arange(K)
    numbers = slots if own_numbers else None
    base, anchor = torch.zeros(N, dtype=torch.int64), torch.zeros(N, dtype=torch.int64)
    out = torch.full((N, LENGTH + K + 1), -1)
    n_accepted = n_steps = 0
    while bool((base < LENGTH).any()):
        position = base[:, None] + 1 + slots
        u_draft = params.uniform(position, Purpose.DRAFT, numbers)
        ids = [anchor]
        for i in range(K):
            ids.append(pick(chains.q_VV[ids[-1]], u_draft[:, i]))
        drafts = torch.stack(ids[1:], 1)
        p, q = chains.p_VV[torch.stack(ids, 1)], chains.q_VV[torch.stack(ids[:-1], 1)]
        u = params.uniform(position, Purpose.ACCEPT, numbers)
        accepted, final = RULES[rule](p, q, drafts, torch.full((N,), K), u)
        last = params.uniform((base + 1 + accepted)[:, None], Purpose.RESIDUAL)[:, 0]
        anchor = pick(final, last)
        emitted = torch.cat((drafts, anchor[:, None]), 1).scatter(
            1, accepted[:, None], anchor[:, None]
        )
        at = (base[:, None] + torch.arange(K + 1)).clamp(max=LENGTH + K)
        is_emitted = torch.arange(K + 1) <= accepted[:, None]
        out.scatter_(1, at, torch.where(is_emitted, emitted, out.gather(1, at)))
        running = base < LENGTH
        n_accepted += int(accepted[running].sum())
        n_steps += int(running.sum())
        base = base + 1 + accepted
    return out[:, :LENGTH], n_accepted / n_steps


def p_value(sequences: Tensor, law: Tensor) -> float:
    """Of the chi-square statistic of the sequences' counts."""
    powers = V ** torch.arange(LENGTH - 1, -1, -1)
    seen = torch.bincount((sequences * powers).sum(1), minlength=V**LENGTH)
    chi2 = ((seen - N * law) ** 2 / (N * law)).sum()
    freedom = torch.tensor((V**LENGTH - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, chi2 / 2))


@pytest.mark.parametrize("rule", RULES)
def test_many_groups_in_a_row_have_the_law_of_the_target(rule: str) -> None:
    chains = Chains(4)
    sequences, mean = rollouts(chains, rule, own_numbers=True)
    assert p_value(sequences, chains.law(0)) > 1e-4
    assert 0.3 < mean < K - 0.3


def test_the_block_rule_needs_numbers_of_their_own_for_every_group() -> None:
    """It looks behind the place where it stops, so a number that is used again there is known to have been high."""
    chains = Chains(4)
    sequences, _ = rollouts(chains, "block", own_numbers=False)
    assert p_value(sequences, chains.law(0)) < 1e-9


@pytest.mark.parametrize("rule", RULES)
def test_a_row_is_judged_as_in_a_group_of_its_own_width(rule: str) -> None:
    """What lies behind a row's own drafts, tokens and distributions of another group, counts for nothing."""
    generator = torch.Generator().manual_seed(2)
    n = 64
    p = torch.rand(n, K + 1, V, generator=generator, dtype=torch.float64)
    q = torch.rand(n, K, V, generator=generator, dtype=torch.float64)
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    drafts = torch.randint(V, (n, K), generator=generator)
    lengths = torch.arange(n) % (K + 1)
    u = torch.rand(n, K, generator=generator, dtype=torch.float64)
    judge = RULES[rule]
    accepted, final = judge(p, q, drafts, lengths, u)
    for b, k in enumerate(lengths.tolist()):
        if k == 0:
            assert int(accepted[b]) == 0
            assert torch.equal(final[b], p[b, 0]), "the first row's own distribution is left"
            continue
        one = slice(b, b + 1)
        alone = judge(p[one, : k + 1], q[one, :k], drafts[one, :k], lengths[one], u[one, :k])
        assert int(alone.accepted_B) == int(accepted[b])
        assert torch.equal(alone.final_BV[0], final[b])
