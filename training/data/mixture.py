"""The mixture of documents and its curriculum.

A document is ids with one class per token: 0 = not trained (the first token), 1 = prompt, 2 = answer.
`Maker.document(rng, progress)` draws one; everything follows from the rng, so a seed gives the corpus.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from training.chat import ChatCodec
from training.data import lists, recall, talk, tools
from training.data.problems import problem
from training.data.recall import PARAGRAPHS

PROMPT, ANSWER = 1, 2
_SYSTEMS = (
    "You are a helpful assistant.",
    "Be brief.",
    "You are k3-mini.",
    "Answer the question of the user.",
    "You are a careful assistant. Show your work.",
)


@dataclass(frozen=True, slots=True)
class Mixture:
    """Shares of tokens by task before and after `recall_step`, and the stages of recall length.

    `stages`: (progress up to which it holds, longest recall document in tokens).
    """

    arithmetic: float = 0.56
    recall: float = 0.20
    late_recall: float = 0.30
    copy: float = 0.06
    lists: float = 0.07
    tools: float = 0.04
    short_recall: float = 0.03
    chat: float = 0.02
    open: float = 0.02
    recall_step: float = 0.45
    stages: tuple[tuple[float, int], ...] = ((0.25, 1024), (0.5, 4096), (1.0, 8192))

    def longest(self, progress: float) -> int:
        """Longest recall document at this point of training."""
        return next(length for until, length in self.stages if progress <= until)

    def shares(self, progress: float) -> dict[str, float]:
        """Token share per task; what late recall adds, arithmetic gives."""
        late = self.late_recall if progress > self.recall_step else self.recall
        return {
            "arithmetic": self.arithmetic + self.recall - late,
            "recall": late,
            "copy": self.copy,
            "lists": self.lists,
            "tools": self.tools,
            "short_recall": self.short_recall,
            "chat": self.chat,
            "open": self.open,
        }


class Document:
    """Ids and their classes while a document is written."""

    __slots__ = ("classes", "ids")

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.classes = bytearray()

    def add(self, ids: list[int], kind: int) -> None:
        """Append ids of one class."""
        self.ids += ids
        self.classes += bytes([kind]) * len(ids)


class Maker:
    """Draws documents for one tokenizer."""

    def __init__(self, codec: ChatCodec, mixture: Mixture) -> None:
        self.codec = codec
        self.mixture = mixture
        self._paragraphs = [codec.text(line + "\n") for line in PARAGRAPHS]
        self._tasks: dict[str, Callable[[random.Random, int], Document]] = {
            "arithmetic": self._arithmetic,
            "recall": self._recall,
            "copy": lambda rng, _: self._plain(*_pair(lists.copy(rng)), rng),
            "lists": lambda rng, _: self._plain(*_pair(lists.listing(rng)), rng),
            "tools": lambda rng, _: self._tools(rng),
            "short_recall": lambda rng, _: self.recall_document(rng, rng.randint(128, 512)),
            "chat": lambda rng, _: self._plain(*talk.chat(rng), rng),
            "open": lambda rng, _: self._plain(*talk.continuation(rng), rng),
        }
        self._mean: dict[str, float] = {}

    def document(self, rng: random.Random, progress: float) -> Document:
        """One document; tasks are drawn so that *tokens* follow the shares."""
        longest = self.mixture.longest(progress)
        shares = {task: share for task, share in self.mixture.shares(progress).items() if share > 0}
        weights = [share / self._length(task, longest) for task, share in shares.items()]
        task = rng.choices(list(shares), weights)[0]
        return self._tasks[task](rng, longest)

    def task(self, name: str, rng: random.Random, longest: int = 512) -> Document:
        """One document of one task."""
        return self._tasks[name](rng, longest)

    def _length(self, task: str, longest: int) -> float:
        """Mean document length of a task in tokens."""
        if task == "recall":
            return (longest - 256) / math.log(longest / 256)
        if task not in self._mean:
            rng = random.Random(f"length of {task}")
            self._mean[task] = (
                sum(len(self._tasks[task](rng, longest).ids) for _ in range(200)) / 200
            )
        return self._mean[task]

    def _start(self, rng: random.Random, chance: float = 0.06) -> Document:
        document = Document()
        if rng.random() < chance:
            document.add(self.codec.system(rng.choice(_SYSTEMS)), PROMPT)
        return document

    def _finish(self, document: Document) -> Document:
        document.classes[0] = 0
        return document

    def _plain(self, question: str, response: str, rng: random.Random) -> Document:
        return self._asked([(question, "", response)], rng)

    def _asked(self, turns: list[tuple[str, str, str]], rng: random.Random) -> Document:
        document = self._start(rng)
        for question, think, response in turns:
            document.add(self.codec.user(self.codec.text(question)), PROMPT)
            document.add(self.codec.answer(think, response), ANSWER)
        return self._finish(document)

    def _arithmetic(self, rng: random.Random, _: int) -> Document:
        turns = [problem(rng) for _ in range(1 if rng.random() < 0.9 else 2)]
        return self._asked([(p.question, p.think, p.response) for p in turns], rng)

    def _tools(self, rng: random.Random) -> Document:
        task = tools.tool_task(rng)
        document = Document()
        document.add(self.codec.tools(task.tools), PROMPT)
        document.add(self.codec.user(self.codec.text(task.question)), PROMPT)
        document.add(self.codec.call(task.name, task.arguments), ANSWER)
        return self._finish(document)

    def _recall(self, rng: random.Random, longest: int) -> Document:
        length = 256 * math.exp(rng.random() * math.log(longest / 256))
        return self.recall_document(rng, int(length))

    def recall_document(
        self,
        rng: random.Random,
        length: int,
        n_facts: int | None = None,
        n_questions: int | None = None,
    ) -> Document:
        """Facts in about `length` tokens of filler, then questions as further turns."""
        n_facts = n_facts or rng.randint(1, min(24, 2 + length // 60))
        passkey = rng.random() < 0.35
        known = recall.facts(n_facts, passkey, rng)
        n_questions = min(
            n_facts, n_questions or (rng.randint(1, 3) if length < 600 else rng.randint(2, 8))
        )
        asked = rng.sample(known, n_questions)
        fact_ids = [self.codec.text(fact.sentence + "\n") for fact in known]
        room = length - sum(map(len, fact_ids)) - 32 * n_questions
        lines: list[list[int]] = []
        while room > 0:
            line = recall.filler_line(rng)
            ids = self._paragraphs[line] if isinstance(line, int) else self.codec.text(line + "\n")
            lines.append(ids)
            room -= len(ids)
        at = recall.places(len(lines), n_facts, rng)
        for place, ids in sorted(
            zip(at, fact_ids, strict=True), reverse=True, key=lambda pair: pair[0]
        ):
            lines.insert(place, ids)
        body = [token for line in lines for token in line]
        document = self._start(rng, 0.03)
        for number, fact in enumerate(asked):
            question = self.codec.text(fact.question)
            document.add(self.codec.user([*body, *question] if number == 0 else question), PROMPT)
            document.add(self.codec.answer("", fact.value), ANSWER)
        return self._finish(document)


def _pair(task: lists.Task) -> tuple[str, str]:
    return task.question, task.response
