"""From answers to figures of a suite: accuracy, self-ending, speed, acceptance; as JSON, tables and a picture."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from k3.bench.answers import Answer
from k3.bench.speculation import Acceptance

# ended: answers that ended by themselves, not at the limit of tokens.
COLUMNS = ("suite", "n", "right", "95 %", "ended", "errors", "tok/s", "s")
Z_95 = 1.96


@dataclass(frozen=True, slots=True)
class Interval:
    """95 % interval of a share."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class SuiteFigures:
    """One suite. accuracy and interval: None where nothing is scored. time_s: from its first to its last answer."""

    suite: str
    n: int
    n_right: int
    accuracy: float | None
    interval: Interval | None
    self_ending: float
    n_errors: int
    prompt_tokens: int
    output_tokens: int
    time_s: float
    acceptance: Acceptance | None

    @property
    def output_tokens_per_s(self) -> float:
        """Tokens of all answers over the time of the suite."""
        return self.output_tokens / self.time_s if self.time_s > 0 else 0.0


def wilson(n_right: int, n: int) -> Interval:
    """Wilson's score interval: sensible at 0 and at n as well. n >= 1."""
    share, z2 = n_right / n, Z_95 * Z_95
    center = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z_95 / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return Interval(max(0.0, center - half), min(1.0, center + half))


def summarize(suite: str, answers: Sequence[Answer], time_s: float) -> SuiteFigures:
    """Figures of at least one answer; those with an error are in every share."""
    n, n_right = len(answers), sum(a.is_right is True for a in answers)
    is_scored = any(a.is_right is not None for a in answers)
    return SuiteFigures(
        suite=suite,
        n=n,
        n_right=n_right,
        accuracy=n_right / n if is_scored else None,
        interval=wilson(n_right, n) if is_scored else None,
        self_ending=sum(a.ends_itself for a in answers) / n,
        n_errors=sum(bool(a.error) for a in answers),
        prompt_tokens=sum(a.prompt_tokens for a in answers),
        output_tokens=sum(a.output_tokens for a in answers),
        time_s=time_s,
        acceptance=_added(a.acceptance for a in answers),
    )


def as_json(
    figures: Sequence[SuiteFigures], answers: Iterable[Answer], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """A plain tree: settings, figures by suite, and every answer that is wrong, with what was expected."""
    suites = {f.suite: _tree(f) for f in figures}
    wrong = [
        {"id": a.item.id, "expected": a.item.answer, "got": a.text, "error": a.error}
        for a in answers
        if a.is_right is False or a.error
    ]
    return {"settings": dict(settings), "suites": suites, "wrong": wrong}


def table(figures: Sequence[SuiteFigures]) -> Table:
    """One row a suite."""
    out = Table(title="accuracy over REST")
    for name in COLUMNS:
        out.add_column(name, justify="left" if name == "suite" else "right")
    for f in figures:
        out.add_row(*row(f))
    return out


def acceptance_table(figures: Sequence[SuiteFigures]) -> Table:
    """Acceptance length and percent per draft position; dashes where the server reports nothing."""
    n_drafts = _most_drafts(figures)
    out = Table(title="tokens per verify step, and % of steps that accept at least k drafts")
    for name in acceptance_columns(n_drafts):
        out.add_column(name, justify="left" if name == "suite" else "right")
    for f in figures:
        out.add_row(*acceptance_row(f, n_drafts))
    return out


def row(f: SuiteFigures) -> list[str]:
    """Cells of `COLUMNS`."""
    interval = f"{100 * f.interval.low:.0f}-{100 * f.interval.high:.0f}%" if f.interval else "-"
    return [
        f.suite,
        str(f.n),
        "-" if f.accuracy is None else f"{f.accuracy:.1%}",
        interval,
        f"{f.self_ending:.1%}",
        str(f.n_errors),
        f"{f.output_tokens_per_s:.1f}",
        f"{f.time_s:.1f}",
    ]


def acceptance_columns(n_drafts: int) -> tuple[str, ...]:
    """Headers of `acceptance_row`."""
    return ("suite", "steps", "length", *(f"k={k}" for k in range(1, n_drafts + 1)))


def acceptance_row(f: SuiteFigures, n_drafts: int) -> list[str]:
    """Suite, steps, acceptance length, then the share of each position in percent."""
    if f.acceptance is None or not f.acceptance.n_steps:
        return [f.suite, *("-" for _ in range(n_drafts + 2))]
    shares = [f"{100 * share:.0f}" for share in f.acceptance.by_position]
    shares += ["-"] * (n_drafts - len(shares))
    return [f.suite, str(f.acceptance.n_steps), f"{f.acceptance.length:.2f}", *shares]


def markdown(figures: Sequence[SuiteFigures], facts: Mapping[str, str]) -> str:
    """The tables as a file to keep: `facts` (machine, versions, command) first."""
    lines = [f"- {name}: {value}" for name, value in facts.items()]
    lines += ["", *_markdown_table(COLUMNS, [row(f) for f in figures])]
    n_drafts = _most_drafts(figures)
    rows = [acceptance_row(f, n_drafts) for f in figures]
    lines += ["", *_markdown_table(acceptance_columns(n_drafts), rows)]
    return "\n".join(lines) + "\n"


def plot(figures: Sequence[SuiteFigures], path: Path) -> None:
    """PNG: accuracy per scored suite with its 95 % interval."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    plt: Any = pyplot  # its stubs are partial
    scored = [(f.suite, f.n, f.accuracy, f.interval) for f in figures if f.accuracy is not None]
    shown = [(f"{suite} ({n})", share, i) for suite, n, share, i in scored if i is not None]
    figure, axis = plt.subplots(figsize=(7, 0.9 + 0.34 * len(shown)), layout="constrained")
    names, shares = [name for name, _, _ in shown], [share for _, share, _ in shown]
    below = [share - i.low for _, share, i in shown]
    above = [i.high - share for _, share, i in shown]
    axis.barh(names, shares, xerr=[below, above], capsize=3, color="tab:blue", alpha=0.8)
    axis.set(xlabel="share of right answers (items), 95 % interval", xlim=(0, 1))
    axis.invert_yaxis()
    axis.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _tree(f: SuiteFigures) -> dict[str, Any]:
    tree: dict[str, Any] = asdict(f) | {"output_tokens_per_s": f.output_tokens_per_s}
    del tree["suite"]
    if f.acceptance is not None:
        derived = {"length": f.acceptance.length, "by_position": f.acceptance.by_position}
        tree["acceptance"] = asdict(f.acceptance) | derived
    return tree


def _most_drafts(figures: Iterable[SuiteFigures]) -> int:
    return max((len(f.acceptance.histogram) - 1 for f in figures if f.acceptance), default=0)


def _added(reports: Iterable[Acceptance | None]) -> Acceptance | None:
    total: Acceptance | None = None
    for report in reports:
        if report is not None:
            total = report if total is None else total.plus(report)
    return total


def _markdown_table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    marks = ["---", *("---:" for _ in names[1:])]
    return [f"| {' | '.join(cells)} |" for cells in (names, marks, *rows)]
