"""Part `steps` of validate.py: steps of the stand-in by context, batch and layout, beside what the model predicts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from validate_fit import Fit, by_part, fit, hardware, messages_s, uniform
from validate_model import Shape, stand_in
from validate_ranks import Message, Note, Point, Task, run

Say = Callable[[str], None]
GROUPS = (1, 8)
CLASSES = {  # of kernels, as a table heads them; milliseconds
    "attention": "attention ms",
    "exchange": "exchange",
    "reduce": "sums",
    "kda": "kda",
    "experts": "experts",
    "products": "products",
    "other": "other",
}


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured: shapes are all pairs of `contexts` and `batches` in both group widths."""

    device: str
    n_devices: int
    depth: int
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    ranks: tuple[int, ...]
    seconds: float  # of one timing
    alone: tuple[int, ...] = ()  # sizes of groups of which one rank is timed

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """All of them, in the order they are measured."""
        return tuple(
            Shape(batch, context, group)
            for group in GROUPS
            for context in self.contexts
            for batch in self.batches
        )


def measure(settings: Settings, end: float, say: Say, keep: Callable[[Any], None]) -> None:
    """Groups of every size, the largest first; `keep` gets the part's tree after every point."""
    points: list[Point] = []
    found: list[Message] = []
    wanted: list[tuple[int, tuple[int, ...]]] = []
    wanted += [(ranks, ()) for ranks in sorted(settings.ranks, reverse=True)]
    wanted += [(1, settings.alone)] if settings.alone else []
    for ranks, alone in wanted:
        task = Task(settings.device, settings.depth, settings.shapes, settings.seconds, alone)
        for said in run(task, ranks, settings.n_devices, end):
            match said:
                case Note(text):
                    say(f"steps: {text}")
                    continue
                case Point():
                    points.append(said)
                    say(f"steps: {named(said)}: {said.step_us / 1e3:.3f} ms, idle {said.idle:.1%}")
                case Message():
                    found.append(said)
            keep(tree(settings, points, found))
        if time.monotonic() >= end:
            break


def tree(settings: Settings, points: Sequence[Point], found: Sequence[Message]) -> dict[str, Any]:
    """As kept in JSON; `from_tree` reads it."""
    return {
        "device": settings.device,
        "depth": settings.depth,
        "points": [asdict(point) for point in points],
        "messages": [asdict(message) for message in found],
    }


def from_tree(part: dict[str, Any]) -> tuple[list[Point], list[Message]]:
    """Points and messages of a kept part, in order of layout and shape."""
    points = sorted((Point(**p) for p in part["points"]), key=_order)
    return points, [Message(**m) for m in part["messages"]]


def _order(p: Point) -> tuple[Any, ...]:
    return (p.alone, p.ranks, p.layout, p.group, p.length, p.rows)


def named(point: Point) -> str:
    """Layout and shape."""
    return f"{placed(point)}, {point.rows} x {point.length}, {point.group} tokens"


def placed(point: Point) -> str:
    """Layout."""
    if point.layout == "one":
        return "one GPU"
    return f"{point.layout} {point.ranks}{', one rank' if point.alone else ''}"


def fits(part: dict[str, Any]) -> tuple[dict[int, Fit], Fit]:
    """Calibrations by part for each group width, and the uniform one over all points."""
    model, points = stand_in(part["device"], part["depth"]), from_tree(part)[0]
    widths = sorted({p.group for p in points})
    fine = {
        width: _fit([by_part(model, p) for p in own], own)
        for width in widths
        if (own := [p for p in points if p.group == width])
    }
    return fine, _fit([uniform(model, p) for p in points], points)


def _fit(features: list[dict[str, float]], points: Sequence[Point]) -> Fit:
    return fit(features, [p.step_us / 1e6 for p in points])


def lines(part: dict[str, Any]) -> list[str]:
    """Markdown."""
    points, found = from_tree(part)
    if not points:
        return ["No point was measured."]
    fine, coarse = fits(part)
    return [
        *_point_table(points, fine),
        "",
        *_gain_table(part, points, fine),
        "",
        *_fit_lines(fine, coarse),
        "",
        *_message_table(found),
    ]


def _point_table(points: Sequence[Point], fine: dict[int, Fit]) -> list[str]:
    errors = {w: iter(zip(f.errors, f.held_out, strict=True)) for w, f in fine.items()}
    out = [
        "| layout | rows | context | tokens | step ms | predicted | error | held out "
        f"| {' | '.join(CLASSES.values())} | GPU idle |",
        f"|---|{'--:|' * (8 + len(CLASSES))}",
    ]
    for p in points:
        error, held_out = next(errors[p.group])
        own = [p.kernels.get(name, 0.0) / 1e3 for name in CLASSES]
        out.append(
            f"| {placed(p)} | {p.rows} | {p.length} | {p.group} | {p.step_us / 1e3:.3f} | "
            f"{p.step_us / 1e3 * (1 + error):.3f} | {error:+.0%} | {held_out:+.0%} | "
            f"{' | '.join(f'{ms:.3f}' for ms in own)} | {p.idle:.1%} |"
        )
    return out


def _gain_table(part: dict[str, Any], points: Sequence[Point], fine: dict[int, Fit]) -> list[str]:
    """What cp gains over tp of the same GPUs: the step, and its attention with the exchange.

    Where one rank was timed, messages are added as calibrated, and the attention is without its exchange.
    """
    model = stand_in(part["device"], part["depth"])
    by_key = {(p.layout, p.ranks, p.alone, *p.shape): p for p in points}

    def step_ms(p: Point) -> float:
        unsent = messages_s(model, p, fine[p.group].factors) if p.alone else 0.0
        return p.step_us / 1e3 + 1e3 * unsent

    out = [
        "| GPUs | rows | context | tokens | tp, ms | cp, ms | step, tp / cp | attention, tp / cp |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for p in points:
        other = by_key.get(("tp", p.ranks, p.alone, *p.shape))
        if p.layout != "cp" or other is None:
            continue
        ours, theirs = step_ms(p), step_ms(other)
        gpus = f"{p.ranks}, by one rank" if p.alone else str(p.ranks)
        attention = f"{_attended(other) / _attended(p):.2f}" if p.kernels else "-"
        out.append(
            f"| {gpus} | {p.rows} | {p.length} | {p.group} | {theirs:.2f} | {ours:.2f} | {theirs / ours:.2f} | "
            f"{attention} |"
        )
    return out


def _attended(p: Point) -> float:
    return p.kernels.get("attention", 0.0) + p.kernels.get("exchange", 0.0)


def _fit_lines(fine: dict[int, Fit], coarse: Fit) -> list[str]:
    names = list(next(iter(fine.values())).factors)
    out = [
        f"| tokens | {' | '.join(names)} | mean error | largest | held out: mean | largest |",
        f"|--:|{'--:|' * (len(names) + 4)}",
    ]
    for width, found in fine.items():
        factors = " | ".join(f"{found.factors[name]:.2f}" for name in names)
        out.append(f"| {width} | {factors} | {_spread(found.errors)} | {_spread(found.held_out)} |")
    shown = ", ".join(f"{key} {value:.4g}" for key, value in hardware(coarse).items())
    return [
        "Factors of the floors at paper values (messages: microseconds each; step: milliseconds):",
        "",
        *out,
        "",
        f"One set of numbers for everything ({shown}): mean error {_spread(coarse.errors)} at most.",
    ]


def _spread(errors: Iterable[float]) -> str:
    sizes = [abs(error) for error in errors]
    return f"{sum(sizes) / len(sizes):.1%} | {max(sizes):.1%}"


def _message_table(found: Sequence[Message]) -> list[str]:
    if not found:
        return []
    return [
        "| collective, recorded | GPUs | tokens | bytes | us |",
        "|---|--:|--:|--:|--:|",
        *(f"| {m.what} | {m.ranks} | {m.tokens} | {m.n_bytes} | {m.time_us:.1f} |" for m in found),
    ]
