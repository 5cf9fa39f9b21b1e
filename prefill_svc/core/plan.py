"""What a step of prefill is: the policy that fills it, its chunks, the plan. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from prefill_svc.core.checkpoints import NO_SLOT
from prefill_svc.core.chunk_size import ChunkCost


@dataclass(frozen=True, slots=True)
class Policy:
    """Numbers that decide how steps are filled.

    token_budget: prompt tokens of one step, all prompts together.
    max_inflight: plans that may wait for their acknowledgement (= pipeline stages).
    chunk_align: lengths of chunks that do not end a prompt are multiples of it where the budget allows.
    max_running: prompts being computed at once.
    max_queue: prompts that may wait for one of those places.
    short_len: a prompt with at most this many tokens left counts as short.
    short_share: part of the budget kept for short prompts.
    max_long: long prompts in the making at once.
    chunk_cost: shortens chunks as the prefix grows; None = one length.
    """

    token_budget: int
    max_inflight: int
    chunk_align: int
    max_running: int
    max_queue: int
    short_len: int
    short_share: float = 0.25
    max_long: int = 1
    chunk_cost: ChunkCost | None = None

    def __post_init__(self) -> None:
        positive = {
            "token_budget": self.token_budget,
            "max_inflight": self.max_inflight,
            "chunk_align": self.chunk_align,
            "max_running": self.max_running,
            "max_long": self.max_long,
        }
        for name, value in positive.items():
            if value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of one prompt, frozen when it was planned.

    read_slot: state slot to continue from, NO_SLOT = zero state. copy_slot: slot that gets a copy of the state after.
    """

    key: int
    epoch: int
    start: int
    length: int
    is_final: bool
    pages: tuple[int, ...]
    read_slot: int
    write_slot: int
    copy_slot: int = NO_SLOT

    @property
    def end(self) -> int:
        """Prompt tokens in the caches once the chunk is computed."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. `step_id` is dense and starts at 1."""

    step_id: int
    chunks: tuple[Chunk, ...]

    @property
    def n_tokens(self) -> int:
        """Prompt tokens of the step."""
        return sum(chunk.length for chunk in self.chunks)
