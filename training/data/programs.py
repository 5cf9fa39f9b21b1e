"""Arithmetic programs: `k*w; n-#1` = steps whose operands are slots, literals or earlier results.

`Program.sample` draws numbers so that every step is one the model is taught: results 1..1999, one factor
at most 12, exact divisions by 2..9. Slot ranges go by letter: k m t small counts; w v p q sizes, prices and
rates; n totals; a b c d amounts.
"""

import random
from dataclasses import dataclass

MAX_RESULT = 1999
_SMALL = frozenset("kmt")
_RATE = frozenset("wvpq")


@dataclass(frozen=True, slots=True)
class Step:
    """One solved step, `left op right = result`."""

    left: int
    op: str
    right: int
    result: int


def amount(rng: random.Random) -> int:
    """An everyday amount: mostly two digits, sometimes three."""
    u = rng.random()
    return (
        rng.randint(2, 40)
        if u < 0.4
        else rng.randint(10, 150)
        if u < 0.85
        else rng.randint(100, 600)
    )


def total(rng: random.Random) -> int:
    """A larger amount that things are taken from."""
    return rng.randint(20, 200) if rng.random() < 0.6 else rng.randint(100, 999)


def draw(slot: str, rng: random.Random) -> int:
    """A number for a slot by its letter."""
    if slot in _SMALL:
        return rng.randint(2, 9)
    if slot in _RATE:
        return rng.randint(2, 25) if rng.random() < 0.5 else rng.randint(2, 60)
    return total(rng) if slot == "n" else amount(rng)


def apply(left: int, op: str, right: int) -> Step | None:
    """The step, or None when it is outside what the model is taught."""
    match op:
        case "+":
            result = left + right
        case "-":
            result = left - right
        case "*":
            if min(left, right) > 12 or max(left, right) > 200:
                return None
            result = left * right
        case "/":
            if not 2 <= right <= 9 or left % right:
                return None
            result = left // right
        case _:
            raise ValueError(f"unknown operator {op!r}; expected one of + - * /")
    return Step(left, op, right, result) if 1 <= result <= MAX_RESULT else None


@dataclass(frozen=True, slots=True)
class Program:
    """Parsed steps; an operand is a slot letter, `#i` (result of step i, from 1) or a literal."""

    steps: tuple[tuple[str, str, str], ...]

    @staticmethod
    def parse(text: str) -> "Program":
        """Parse `x*y; #1-z`."""
        steps: list[tuple[str, str, str]] = []
        for part in text.split(";"):
            body = part.strip()
            at = next(i for i, char in enumerate(body) if char in "+-*/")
            steps.append((body[:at], body[at], body[at + 1 :]))
        return Program(tuple(steps))

    @property
    def slots(self) -> tuple[str, ...]:
        """Slot letters in order of first use."""
        seen: dict[str, None] = {}
        for left, _, right in self.steps:
            for operand in (left, right):
                if operand.isalpha():
                    seen[operand] = None
        return tuple(seen)

    def sample(self, rng: random.Random) -> tuple[dict[str, int], list[Step]]:
        """Numbers for the slots and the solved steps; raises RuntimeError if none fit (a bad program)."""
        for _ in range(5000):
            numbers: dict[str, int] = {}
            solved = self._attempt(numbers, rng)
            if solved is not None:
                return numbers, solved
        raise RuntimeError(f"no numbers found for program {self.steps}; loosen its slots")

    def _attempt(self, numbers: dict[str, int], rng: random.Random) -> list[Step] | None:
        solved: list[Step] = []
        for left, op, right in self.steps:
            if op in "/-" and left.isalpha() and left not in numbers:
                divisor = self._value(right, numbers, solved, rng)
                base = divisor * rng.randint(2, 120) if op == "/" else divisor + rng.randint(1, 300)
                numbers[left] = base
            step = apply(
                self._value(left, numbers, solved, rng),
                op,
                self._value(right, numbers, solved, rng),
            )
            if step is None:
                return None
            solved.append(step)
        return solved

    @staticmethod
    def _value(
        operand: str, numbers: dict[str, int], solved: list[Step], rng: random.Random
    ) -> int:
        if operand.startswith("#"):
            return solved[int(operand[1:]) - 1].result
        if operand.isdigit():
            return int(operand)
        if operand not in numbers:
            numbers[operand] = draw(operand, rng)
        return numbers[operand]
