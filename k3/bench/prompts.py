"""What the load generator asks: chat questions of the demo's kind, or random token ids of exact length.

Both come from a seed, so a run can be repeated. `chat` is what a user does; `random` fixes prompt and output length
(`ignore_eos`), which is what one wants for figures.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

NAMES = ("Grace", "Ada", "Tom", "Nina", "Omar", "Lena", "Ben", "Ivy")


@dataclass(frozen=True, slots=True)
class Call:
    """One request: path and JSON body, without the streaming fields."""

    path: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ChatWorkload:
    """Arithmetic questions; the answer ends by itself or at `output_tokens`."""

    output_tokens: int
    seed: int

    def call(self, i: int) -> Call:
        """The i-th request."""
        rng = random.Random(f"{self.seed}/{i}")
        per_day, days = rng.randint(5, 40), rng.randint(2, 9)
        pages = per_day * days + rng.randint(20, 400)
        question = (
            f"{rng.choice(NAMES)} reads {per_day} pages every day. After {days} days, "
            f"how many of the {pages} pages are unread?"
        )
        body = {
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_completion_tokens": self.output_tokens,
        }
        return Call("/v1/chat/completions", body)


@dataclass(frozen=True, slots=True)
class RandomWorkload:
    """Random ids in [0, vocab) of exactly `prompt_tokens`, answered by exactly `output_tokens`."""

    prompt_tokens: int
    output_tokens: int
    vocab: int
    seed: int

    def call(self, i: int) -> Call:
        """The i-th request."""
        rng = random.Random(f"{self.seed}/{i}")
        body = {
            "prompt": [rng.randrange(self.vocab) for _ in range(self.prompt_tokens)],
            "temperature": 0,
            "max_tokens": self.output_tokens,
            "ignore_eos": True,
        }
        return Call("/v1/completions", body)


Workload = ChatWorkload | RandomWorkload
