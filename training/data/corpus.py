"""Text the tokenizer's ranks are learned from: samples of every task, the filler, and the words of K3's tags."""

import json
import random
from collections.abc import Iterator

from training.data import lists, recall, talk, tools
from training.data.problems import problem

_TAG_WORDS = [
    "message",
    " role",
    '="',
    '"',
    "user",
    "assistant",
    "system",
    "think",
    "response",
    "tools",
    "call",
    " tool",
    " index",
    "argument",
    " key",
    " type",
    "string",
    "number",
    "boolean",
    "tool-declare",
    "thinking-effort",
    "tool-choice",
    " name",
    "json",
    "object",
    "array",
    "null",
    "tool",
    "1",
]


def texts(seed: int = 1, n_samples: int = 12_000) -> Iterator[str]:
    """The corpus, piece by piece; held-out texts are not in it."""
    rng = random.Random(f"tokenizer {seed}")
    for _ in range(n_samples):
        drawn = problem(rng)
        yield drawn.question
        yield drawn.think
        yield drawn.response
    for _ in range(n_samples // 6):
        for task in (lists.copy(rng), lists.listing(rng)):
            yield task.question
            yield task.response
        task = tools.tool_task(rng)
        yield json.dumps(task.tools, sort_keys=True, separators=(",", ":"))
        yield task.question
        yield from talk.chat(rng)
        line = recall.filler_line(rng)
        yield line if isinstance(line, str) else recall.PARAGRAPHS[line]
        for fact in recall.facts(2, rng.random() < 0.3, rng):
            yield fact.sentence + "\n"
            yield fact.question
            yield fact.value
    yield from (line + "\n" for line in recall.PARAGRAPHS)
    for word in _TAG_WORDS:
        yield from [word] * n_samples
