"""Per-token bounds brought into a library's causal answer: a causal pass in float64 stands where the library would.

What the stand-in leaves in queries without keys is NaN, as a library may.
"""

from __future__ import annotations

import pytest
import torch
from k3_kernels.backends.windowed import corrected, windowed_plan

from tests.compare import assert_close
from tests.latent_steps import SHAPES, step

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log:RuntimeWarning")


@pytest.mark.parametrize("bounds", SHAPES.values(), ids=SHAPES)
def test_a_causal_pass_and_the_window_equal_the_bounds(bounds: list[list[int]]) -> None:
    case = step(bounds, heads=5)
    group, tokens = case.group, case.page_tokens
    plan = windowed_plan(case.table_BW, case.bound_T, group, tokens)
    scale, value = 0.2, 32
    seen = plan.length_B.unsqueeze(1) - group + 1 + torch.arange(group, device=case.bound_T.device)
    causal = type(case)(
        case.q_THK,
        case.cache_PTK.nan_to_num(),
        plan.page_table_BW,
        seen.clamp(min=0).flatten().to(torch.int32),
        group,
    )
    o, lse = causal.reference(scale, value)
    blind = lse == float("-inf")
    o[blind], lse[blind] = float("nan"), float("inf")
    assert bool((causal.bound_T <= case.bound_T)[case.bound_T > 0].all())

    lse_BGH = lse.float().unflatten(0, (-1, group))
    got_o, got_lse = corrected(case.q_THK, case.cache_PTK, plan, scale, o.float(), lse_BGH)

    expected_o, expected_lse = case.reference(scale, value)
    assert_close(got_o.cpu(), expected_o.cpu(), 2e-6, "o")
    assert_close(got_lse.cpu(), expected_lse.cpu(), 2e-6, "lse")
