"""Per-token bounds brought into a library's answer: a pass in float64 by its rule stands where the library would.

What the stand-in leaves in queries without keys is NaN, as a library may.
"""

from __future__ import annotations

import pytest
import torch
from k3_kernels.backends.windowed import corrected, windowed_plan

from tests.compare import assert_close
from tests.latent_steps import SHAPES, step

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log:RuntimeWarning")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("bounds", SHAPES.values(), ids=SHAPES)
def test_a_pass_and_the_windows_equal_the_bounds(bounds: list[list[int]], causal: bool) -> None:
    case = step(bounds, heads=5)
    group, tokens = case.group, case.page_tokens
    plan = windowed_plan(case.table_BW, case.bound_T, group, tokens, causal)
    scale, value = 0.2, 32
    later = torch.arange(group - 1, -1, -1, device=case.bound_T.device) * causal
    seen = plan.length_B.unsqueeze(1) - later
    blindly = type(case)(
        case.q_THK,
        case.cache_PTK.nan_to_num(),
        plan.page_table_BW,
        seen.clamp(min=0).flatten().to(torch.int32),
        group,
    )
    o, lse = blindly.reference(scale, value)
    blind = lse == float("-inf")
    o[blind], lse[blind] = float("nan"), float("inf")
    assert bool((blindly.bound_T <= case.bound_T)[case.bound_T > 0].all())

    lse_BGH = lse.float().unflatten(0, (-1, group))
    got_o, got_lse = corrected(case.q_THK, case.cache_PTK, plan, scale, o.float(), lse_BGH)

    expected_o, expected_lse = case.reference(scale, value)
    assert_close(got_o.cpu(), expected_o.cpu(), 2e-6, "o")
    assert_close(got_lse.cpu(), expected_lse.cpu(), 2e-6, "lse")
