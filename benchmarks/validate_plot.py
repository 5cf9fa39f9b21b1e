"""Plots of validate.py: steps by context, measured and predicted, a picture for each group width and batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from validate_fit import Fit
from validate_ranks import Point
from validate_steps import fits, from_tree, placed

COLORS = ("tab:gray", "tab:red", "tab:blue", "tab:orange", "tab:green", "tab:purple", "tab:brown")


def plot(part: dict[str, Any], path: Path) -> None:
    """PNG of part `steps`."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator

    plt: Any = pyplot  # its stubs are partial
    points = from_tree(part)[0]
    fine = fits(part)[0]
    predicted = {id(p): p.step_us / 1e3 * (1 + error) for p, error in _errors(points, fine)}
    groups, rows = sorted({p.group for p in points}), sorted({p.rows for p in points})
    figure, axes = plt.subplots(
        len(groups),
        len(rows),
        figsize=(4.2 * len(rows), 3.4 * len(groups)),
        layout="constrained",
        squeeze=False,
        sharex=True,
    )
    layouts = sorted({(p.ranks, placed(p)) for p in points})
    for (i, group), (j, n_rows) in ((g, r) for g in enumerate(groups) for r in enumerate(rows)):
        axis = axes[i][j]
        for color, (_ranks, label) in zip(COLORS, layouts, strict=False):
            own = [p for p in points if (placed(p), p.group, p.rows) == (label, group, n_rows)]
            own.sort(key=lambda p: p.length)
            lengths = [p.length for p in own]
            axis.plot(lengths, [p.step_us / 1e3 for p in own], "o-", color=color, label=label)
            axis.plot(lengths, [predicted[id(p)] for p in own], "x:", color=color)
        axis.set(title=f"rows: {n_rows}, tokens of each: {group}", xscale="log", yscale="log")
        axis.set_xticks(sorted({p.length for p in points}), labels=_ticks(points))
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 6, 8)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    for row in axes:
        row[0].set_ylabel("step, ms (x: predicted)")
    for axis in axes[-1]:
        axis.set_xlabel("tokens of context per row")
    axes[0][0].legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _errors(points: list[Point], fine: dict[int, Fit]) -> list[tuple[Point, float]]:
    """Every point with the relative error of its prediction."""
    found: list[tuple[Point, float]] = []
    for group, fitted in fine.items():
        own = [p for p in points if p.group == group]
        found += zip(own, fitted.errors, strict=True)
    return found


def _ticks(points: list[Point]) -> list[str]:
    lengths = sorted({p.length for p in points})
    return [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths]
