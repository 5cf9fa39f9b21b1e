"""Where a prompt's recurrent state is worth keeping: rungs at regular distance, the last page, and a known demand.

A checkpoint is filed only when a chunk *ends* on a target, so chunks are cut there. Cut and keep ask the same question,
`reason`. A demand is a place where an earlier prompt would have continued this one, had a checkpoint been there: it
comes before rungs that share a chunk with it, because it is reuse somebody has asked for. Pure arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Reason(Enum):
    """Why a position is a target."""

    RUNG = "rung"
    DEMAND = "demand"
    ANCHOR = "anchor"


class RungPolicy(Enum):
    """Which rung ends a chunk that spans several."""

    LATEST = "latest"
    EARLIEST = "earliest"


@dataclass(frozen=True, slots=True)
class Ladder:
    """The rule of one instance.

    interval: tokens between rungs, snapped down to whole pages; below one page the ladder is off, with all targets.
    has_anchor: the last page boundary inside a prompt is a target too. successor_room: tokens that must follow one.
    """

    page_tokens: int
    interval: int = 0
    has_anchor: bool = False
    successor_room: int = 1
    policy: RungPolicy = RungPolicy.LATEST

    @property
    def step(self) -> int:
        """Tokens between rungs; 0 = off."""
        return self.interval - self.interval % self.page_tokens

    def last_target(self, prompt_len: int) -> int:
        """Beyond it nothing is a target: enough tokens of the prompt must follow."""
        return prompt_len - self.successor_room

    def reason(self, position: int, prompt_len: int, demand: int) -> Reason | None:
        """Why the state at `position` is kept, None when it is not. demand: 0 = none."""
        if not self.step or not 0 < position <= self.last_target(prompt_len):
            return None
        if position % self.step == 0:
            return Reason.RUNG
        if position == demand:
            return Reason.DEMAND
        if position == self._anchor(prompt_len):
            return Reason.ANCHOR
        return None

    def cut(self, start: int, end: int, prompt_len: int, demand: int) -> int:
        """End of the chunk that begins at `start` and may go to `end`: a target if one lies in between, else `end`."""
        if not self.step:
            return end
        if start < demand <= end:
            return demand
        reach = min(end, self.last_target(prompt_len))
        rung = reach - reach % self.step
        if self.policy is RungPolicy.EARLIEST:
            rung = min(rung, start - start % self.step + self.step)
        targets = [t for t in (rung, self._anchor(prompt_len)) if start < t <= end]
        if not targets:
            return end
        return max(targets) if self.policy is RungPolicy.LATEST else min(targets)

    def _anchor(self, prompt_len: int) -> int:
        """The last page boundary with room behind it; 0 without one."""
        if not self.has_anchor:
            return 0
        last = self.last_target(prompt_len)
        return max(0, last - last % self.page_tokens)
