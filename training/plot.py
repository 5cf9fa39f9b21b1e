"""Loss curves as a picture; matplotlib draws without a display."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib.figure import Figure


def plot_losses(log: Sequence[Mapping[str, float]], keys: Sequence[str], path: Path) -> None:
    """One line per key over `step`, log scale."""
    figure = Figure(figsize=(8, 5))
    axes = figure.subplots()
    for key in keys:
        axes.plot([entry["step"] for entry in log], [entry[key] for entry in log], label=key)
    axes.set_xlabel("step")
    axes.set_yscale("log")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=100)
