"""How far steps run ahead of their results: the one answer that scheduler and ranks both use. Pure.

With one stage the device's row table is the truth, so a row may be in several steps whose results are unknown. Over
stages only the last one knows what was accepted: a row is in one step at a time, its plan carries the row's state to
every stage, and the steps in flight hold different rows.
"""

from __future__ import annotations

from typing import NamedTuple

from k3.config.tree import EngineConfig


class PlanDepth(NamedTuple):
    """steps: unacknowledged ones of verify groups at most. per_row: of them that may name one row.

    prompts: unacknowledged ones of prompts computed here, beside those.
    """

    steps: int
    per_row: int
    prompts: int = 0


def computes_prompts(config: EngineConfig) -> bool:
    """Whether a decode service computes prompts itself: all, or short ones."""
    return config.role == "both" or config.schedule.local_prefill_max > 0


def plan_depth(config: EngineConfig) -> PlanDepth:
    """Of a decode service."""
    prompts = config.parallel.pp if computes_prompts(config) else 0
    if config.parallel.pp > 1:
        return PlanDepth(config.parallel.pp, 1, prompts)
    return PlanDepth(config.schedule.depth, config.schedule.depth, prompts)
