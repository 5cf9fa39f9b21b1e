"""The model of a step's time (`k3-bench roofline`) against measured steps: calibrated, and how far it is off.

Two calibrations. `uniform`: the numbers a hardware description has (efficiency, link_bw, latency), one set for all.
`by part`: each part of a step (attention's bytes and operations, KDA, experts, other weights, messages) takes a factor
of its floor, and a step a fixed time; verify groups of another width run other kernels and get factors of their own.
Factors are not negative and minimise the sum of squared relative errors; what the points say nothing about stays near
`USUAL`. `held out`: each point predicted with the factors of all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from validate_model import PAGE, StandIn
from validate_ranks import Point

from k3.bench import cost

PAPER = cost.PRESETS["h200_nvlink"]
USUAL, PULL = (
    {"message": 20.0, "step": 0.5},
    1e-3,
)  # 1.5 for floors; weight of a factor's own distance
Features = dict[str, float]  # seconds at paper values by part


@dataclass(frozen=True, slots=True)
class Fit:
    """Factors by part, and relative errors of all points in their order, as fitted and held out."""

    factors: dict[str, float]
    errors: tuple[float, ...]
    held_out: tuple[float, ...]


def layout_of(point: Point) -> cost.Layout:
    """As the cost model names it."""
    tp, cp = (1, point.ranks) if point.layout == "cp" else (point.ranks, 1)
    return cost.Layout(tp, cp, "value", PAGE)


def by_part(model: StandIn, point: Point) -> Features:
    """Floors of a point's parts; `message` counts them, a microsecond each; `step` is one millisecond."""
    sizes, layout = model.sizes, layout_of(point)
    load = cost.Load(point.rows, point.length, point.group - 1)
    floor = cost.step_cost(sizes, replace(PAPER, latency=0.0), layout, load)
    late = cost.step_cost(sizes, replace(PAPER, latency=1e-6), layout, load)
    keys = layout.local_len(point.length) * load.tokens
    n_ops = 2 * sizes.mla_layers * keys * sizes.heads / layout.tp * (sizes.row + sizes.latent)
    weights = floor.mla_weights + floor.lm_head
    sends = 0.0 if point.alone else 1.0
    return {
        "attention bytes": floor.kv_bytes_per_rank / PAPER.mem_bw,
        "attention operations": n_ops / PAPER.flops,
        "kda": floor.kda,
        "experts": floor.moe,
        "other weights": weights + 2 * model.dense_parameters / layout.ranks / PAPER.mem_bw,
        "link": sends * (floor.mla_all_to_all + floor.all_reduce),
        "message": sends * (late.total - floor.total),
        "step": 1e-3,
    }


def messages_s(model: StandIn, point: Point, factors: Features) -> float:
    """Seconds that the messages of a point's step take by a calibration, whether they were sent or not."""
    parts = by_part(model, replace(point, alone=False))
    return sum(factors[name] * parts[name] for name in ("link", "message"))


def uniform(model: StandIn, point: Point) -> Features:
    """The same with one factor for all bytes and operations, as a hardware description has it."""
    parts = by_part(model, point)
    attention = max(parts["attention bytes"], parts["attention operations"])
    computed = attention + parts["kda"] + parts["experts"] + parts["other weights"]
    return {"device": computed, "link": parts["link"], "message": parts["message"]}


def fit(features: Sequence[Features], measured_s: Sequence[float]) -> Fit:
    """Factors of at least one point."""
    names = list(features[0])
    usual = np.array([USUAL.get(name, 1.5) for name in names])
    table = np.array([[row[name] for name in names] for row in features])
    seconds = np.array(measured_s)
    found = _factors(table, seconds, usual)
    held_out = np.zeros(len(seconds))
    for i in range(len(seconds)):
        others = np.arange(len(seconds)) != i
        held_out[i] = table[i] @ _factors(table[others], seconds[others], usual) / seconds[i] - 1
    errors = table @ found / seconds - 1
    factors = dict(zip(names, map(float, found), strict=True))
    return Fit(factors, tuple(map(float, errors)), tuple(map(float, held_out)))


def _factors(table: np.ndarray, seconds: np.ndarray, usual: np.ndarray) -> np.ndarray:
    """Non-negative x of least |table x / seconds - 1|^2 + PULL |x / usual - 1|^2.

    The most negative column leaves until none is.
    """
    n = len(usual)
    scaled = np.vstack((table / seconds[:, None] * usual, PULL**0.5 * np.eye(n)))
    wanted = np.concatenate((np.ones(len(seconds)), PULL**0.5 * np.ones(n)))
    kept, found = list(range(n)), np.zeros(n)
    while kept:
        best = np.linalg.lstsq(scaled[:, kept], wanted, rcond=None)[0]
        if best.min() >= 0:
            found[kept] = best
            break
        kept.pop(int(best.argmin()))
    return found * usual


def hardware(found: Fit) -> dict[str, float]:
    """A `uniform` calibration as `k3-bench roofline --hardware FILE` reads it."""
    device, link, message = (max(x, 1e-9) for x in found.factors.values())
    return {
        "mem_bw": PAPER.mem_bw,
        "flops": PAPER.flops,
        "link_bw": PAPER.link_bw / link,
        "latency": 1e-6 * message,
        "efficiency": 1 / device,
        "memory_bytes": PAPER.memory_bytes,
    }
