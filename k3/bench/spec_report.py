"""Figures of `k3-bench spec`, and how they are shown: tables, Markdown, JSON, a picture.

Gains are against plain decoding of the same suite with as many requests in flight: once of the tokens/s of everything,
prefill and the way there included, which short answers to long prompts are mostly made of, and once of decoding alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from k3.bench.speculation import Acceptance

PLAIN, TOTAL = "plain", "all of these"


@dataclass(frozen=True, slots=True)
class Figures:
    """One suite in one mode. acceptance: None without drafts; n_different: answers that are not plain decoding's.

    decode_tokens, decode_s: tokens after each answer's first, and the seconds they took, summed over the answers; 0
    where only everything together was timed.
    """

    suite: str
    mode: str
    in_flight: int
    n_items: int
    n_tokens: int
    seconds: float
    acceptance: Acceptance | None
    n_different: int
    decode_tokens: int = 0
    decode_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Output tokens over the time of the suite, prefill included."""
        return self.n_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Speed of one request while it decodes; None where that was not timed."""
        return self.decode_tokens / self.decode_s if self.decode_s > 0 else None

    def plus(self, other: Figures) -> Figures:
        """Both suites together."""
        acceptance = self.acceptance
        if acceptance is not None and other.acceptance is not None:
            acceptance = acceptance.plus(other.acceptance)
        return Figures(
            TOTAL,
            self.mode,
            self.in_flight,
            self.n_items + other.n_items,
            self.n_tokens + other.n_tokens,
            self.seconds + other.seconds,
            acceptance,
            self.n_different + other.n_different,
            self.decode_tokens + other.decode_tokens,
            self.decode_s + other.decode_s,
        )


@dataclass(frozen=True, slots=True)
class Cost:
    """Where the time of decode steps went in one mode. step_s and forward_s are summed over the steps.

    What a step does beside the model's forward: tables, judgement, and with drafts the drafter's context and block.
    """

    mode: str
    in_flight: int
    n_steps: int
    step_s: float
    forward_s: float


FIGURES = (
    "suite", "mode", "in flight", "items", "tokens/s", "gain", "decode tokens/s", "decode gain", "tokens/step",
    "answers",
)  # fmt: skip
POSITIONS = ("suite", "mode", "in flight", "% accepted at 1, 2 ..")
COSTS = ("mode", "in flight", "steps", "step ms", "verify ms", "judge + draft ms", "share")


def with_totals(figures: Sequence[Figures]) -> list[Figures]:
    """The figures, and their sums over the suites of a mode where there are several."""
    sums: dict[tuple[str, int], Figures] = {}
    for f in figures:
        key = (f.mode, f.in_flight)
        sums[key] = f if key not in sums else sums[key].plus(f)
    ordered = sorted(figures, key=lambda f: (f.suite, f.in_flight))
    return [*ordered, *(f for f in sums.values() if f.suite == TOTAL)]


def plain_of(f: Figures, figures: Sequence[Figures]) -> Figures | None:
    """Plain decoding of the same; None where it was not measured."""
    for other in figures:
        if (other.suite, other.mode, other.in_flight) == (f.suite, PLAIN, f.in_flight):
            return other
    return None


def gain(f: Figures, figures: Sequence[Figures]) -> float | None:
    """Tokens/s against plain decoding of the same; None where that was not measured."""
    plain = plain_of(f, figures)
    return None if plain is None else _ratio(f.tokens_per_s, plain.tokens_per_s)


def decode_gain(f: Figures, figures: Sequence[Figures]) -> float | None:
    """As `gain`, of decoding alone."""
    plain = plain_of(f, figures)
    return None if plain is None else _ratio(f.decode_tokens_per_s, plain.decode_tokens_per_s)


def _ratio(speed: float | None, of: float | None) -> float | None:
    return None if speed is None or not of else speed / of


def _shown(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def figure_rows(figures: Sequence[Figures]) -> list[list[str]]:
    """Cells of `FIGURES`, sums included."""
    everything = with_totals(figures)
    rows: list[list[str]] = []
    for f in everything:
        rows.append(
            [
                f.suite,
                f.mode,
                str(f.in_flight),
                str(f.n_items),
                _shown(f.tokens_per_s, 1),
                _shown(gain(f, everything), 2),
                _shown(f.decode_tokens_per_s, 1),
                _shown(decode_gain(f, everything), 2),
                "-" if f.acceptance is None else f"{f.acceptance.length:.3f}",
                f"{f.n_different} DIFFER" if f.n_different else "equal",
            ]
        )
    return rows


def position_rows(figures: Sequence[Figures]) -> list[list[str]]:
    """Cells of `POSITIONS`: share of steps that accept the draft at each position and all before it, sums included."""
    return [
        [
            f.suite,
            f.mode,
            str(f.in_flight),
            " ".join(f"{100 * x:.0f}" for x in f.acceptance.by_position),
        ]
        for f in with_totals(figures)
        if f.acceptance is not None
    ]


def cost_rows(costs: Sequence[Cost]) -> list[list[str]]:
    """Cells of `COSTS`: means of one step."""
    rows: list[list[str]] = []
    for c in costs:
        n = max(1, c.n_steps)
        rest = c.step_s - c.forward_s
        cells = [f"{1e3 * seconds / n:.2f}" for seconds in (c.step_s, c.forward_s, rest)]
        share = rest / c.step_s if c.step_s > 0 else 0.0
        rows.append([c.mode, str(c.in_flight), str(c.n_steps), *cells, f"{share:.0%}"])
    return rows


def table(title: str, names: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """For a terminal; numbers to the right."""
    out = Table(title=title)
    for name in names:
        out.add_column(name, justify="left" if name in ("suite", "mode") else "right")
    for row in rows:
        out.add_row(*row)
    return out


def markdown(figures: Sequence[Figures], costs: Sequence[Cost], facts: Mapping[str, str]) -> str:
    """The tables as a file to keep."""
    lines = [f"- {name}: {value}" for name, value in facts.items()]
    tables = (
        (FIGURES, figure_rows(figures)),
        (POSITIONS, position_rows(figures)),
        (COSTS, cost_rows(costs)),
    )
    for names, rows in tables:
        marks = ["---", *("---:" for _ in names[1:])]
        lines += ["", *(f"| {' | '.join(cells)} |" for cells in (names, marks, *rows))]
    return "\n".join(lines) + "\n"


def as_json(
    figures: Sequence[Figures], costs: Sequence[Cost], facts: Mapping[str, str]
) -> dict[str, Any]:
    """A plain tree."""
    everything = with_totals(figures)
    suites: list[dict[str, Any]] = []
    for f in everything:
        derived = {
            "tokens_per_s": f.tokens_per_s,
            "gain": gain(f, everything),
            "decode_tokens_per_s": f.decode_tokens_per_s,
            "decode_gain": decode_gain(f, everything),
        }
        if f.acceptance is not None:
            derived["length"] = f.acceptance.length
        shares = () if f.acceptance is None else f.acceptance.by_position
        suites.append(asdict(f) | derived | {"by_position": shares})
    return {"settings": dict(facts), "figures": suites, "steps": [asdict(c) for c in costs]}


def plot(figures: Sequence[Figures], path: Path) -> None:
    """PNG: gain and tokens per step of every suite, a bar for each mode and number in flight."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    plt: Any = pyplot  # its stubs are partial
    everything = with_totals(figures)
    shown = [f for f in everything if f.mode != PLAIN]
    names = [f"{f.suite}, {f.mode}, {f.in_flight}" for f in shown]
    gains = [gain(f, everything) or 0.0 for f in shown]
    lengths = [0.0 if f.acceptance is None else f.acceptance.length for f in shown]
    height = 1.2 + 0.28 * len(shown)
    figure, axes = plt.subplots(1, 2, figsize=(10, height), sharey=True, layout="constrained")
    for axis, values, label in zip(
        axes, (gains, lengths), ("tokens/s against plain decoding", "tokens per step"), strict=True
    ):
        axis.barh(names, values, color="tab:blue", alpha=0.8)
        axis.axvline(1.0, color="black", linewidth=0.8)
        axis.set(xlabel=label)
        axis.grid(axis="x", alpha=0.3)
    axes[0].invert_yaxis()
    figure.savefig(path, dpi=120)
    plt.close(figure)
