"""The model of a step's time (`k3-bench roofline`) against measured steps: calibrated, and how far it is off.

Two calibrations. `uniform`: the numbers a hardware description has (efficiency, link_bw, latency), one set for all.
`by part`: each part of a step (attention by bytes or by operations, whichever takes longer; KDA states, experts, other
weights, messages) takes a factor of its floor, each token a time that no rank shares out (routing, block residuals),
and a step a fixed time; verify groups of another width run other kernels and get factors of their own. Factors are not
negative and minimise the sum of squared relative errors; what the points say nothing about stays near `USUAL`.
`held out`: each point predicted with the factors of all others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from validate_model import PAGE, StandIn
from validate_ranks import Point

from k3.bench import cost

PAPER = cost.PRESETS["h200_nvlink"]
USUAL = {"message": 20.0, "token": 5.0, "step": 0.5}  # 1.5 for floors
PULL = 1e-3  # weight of a factor's own distance
BYTES, OPERATIONS = "attention bytes", "attention operations"
ROUNDS = 20  # of deciding which of the two takes longer
TILE = 128  # query rows of the widest tile of an attention kernel
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


def tiled(query_rows: int) -> int:
    """Rows that an attention kernel multiplies for so many: a power of two from 16 to a tile, then whole tiles."""
    if query_rows > TILE:
        return math.ceil(query_rows / TILE) * TILE
    return max(16, 1 << (query_rows - 1).bit_length())


def by_part(model: StandIn, point: Point) -> Features:
    """Floors of a point's parts; `message` and `token` are a microsecond for each of them, `step` is a millisecond."""
    sizes, layout = model.sizes, layout_of(point)
    load = cost.Load(point.rows, point.length, point.group - 1)
    floor = cost.step_cost(sizes, replace(PAPER, latency=0.0), layout, load)
    late = cost.step_cost(sizes, replace(PAPER, latency=1e-6), layout, load)
    keys = layout.local_len(point.length) * point.rows
    query_rows = tiled(sizes.heads // layout.tp * point.group)
    n_ops = 2 * sizes.mla_layers * keys * query_rows * (sizes.row + sizes.latent)
    dense = 2 * model.dense_parameters / layout.ranks / PAPER.mem_bw
    states = _state_bytes(sizes, point) / layout.ranks / PAPER.mem_bw
    sends = 0.0 if point.alone else 1.0
    return {
        BYTES: floor.kv_bytes_per_rank / PAPER.mem_bw,
        OPERATIONS: n_ops / PAPER.flops,
        "states": states,
        "experts": floor.moe,
        "other weights": floor.mla_weights
        + _kda_weights_s(sizes, layout, load)
        + floor.lm_head
        + dense,
        "link": sends * (floor.mla_all_to_all + floor.all_reduce),
        "message": sends * (late.total - floor.total),
        "token": 1e-6 * load.tokens,
        "step": 1e-3,
    }


def _state_bytes(m: cost.Sizes, point: Point) -> float:
    """KDA states in and out, and the records of a verify group in and out, of all layers and heads."""
    records = 2 * 3 * point.group * m.kda_dim * 4 if point.group > 1 else 0
    return m.kda_layers * point.rows * m.kda_heads * (2 * m.kda_dim**2 * 4 + records)


def _kda_weights_s(m: cost.Sizes, layout: cost.Layout, load: cost.Load) -> float:
    """Projections of the KDA layers, one rank's share."""
    own = m.kda_layers * m.kda / layout.ranks
    return max(own * m.weight_bytes / PAPER.mem_bw, 2 * load.tokens * own / PAPER.flops)


def messages_s(model: StandIn, point: Point, factors: Features) -> float:
    """Seconds that the messages of a point's step take by a calibration, whether they were sent or not."""
    parts = by_part(model, replace(point, alone=False))
    return sum(factors[name] * parts[name] for name in ("link", "message"))


def uniform(model: StandIn, point: Point) -> Features:
    """The same with one factor for all bytes and operations, as a hardware description has it."""
    parts = by_part(model, point)
    computed = max(parts[BYTES], parts[OPERATIONS])
    computed += parts["states"] + parts["experts"] + parts["other weights"]
    return {"device": computed, "link": parts["link"], "message": parts["message"]}


def fit(features: Sequence[Features], measured_s: Sequence[float]) -> Fit:
    """Factors of at least one point."""
    found = _calibrated(features, measured_s)
    errors = [
        _seconds(row, found) / seconds - 1
        for row, seconds in zip(features, measured_s, strict=True)
    ]
    held_out: list[float] = []
    for i, (row, seconds) in enumerate(zip(features, measured_s, strict=True)):
        others = [j for j in range(len(features)) if j != i]
        without = _calibrated([features[j] for j in others], [measured_s[j] for j in others])
        held_out.append(_seconds(row, without) / seconds - 1)
    return Fit(found, tuple(errors), tuple(held_out))


def _calibrated(features: Sequence[Features], measured_s: Sequence[float]) -> dict[str, float]:
    """Factors; which side of attention takes longer at a point is decided by those of the round before."""
    if not features:
        return {}
    names = list(features[0])
    usual = np.array([USUAL.get(name, 1.5) for name in names])
    seconds = np.array(measured_s)
    factors = dict(zip(names, map(float, usual), strict=True))
    decided: list[Features] = []
    for _ in range(ROUNDS):
        before, decided = decided, [_longer(row, factors) for row in features]
        if decided == before:
            break
        table = np.array([list(row.values()) for row in decided])
        factors = dict(zip(names, map(float, _factors(table, seconds, usual)), strict=True))
    return factors


def _longer(row: Features, factors: dict[str, float]) -> Features:
    """Without the side of attention that takes less time."""
    if BYTES not in row:
        return row
    is_bytes = row[BYTES] * factors[BYTES] >= row[OPERATIONS] * factors[OPERATIONS]
    return row | {OPERATIONS if is_bytes else BYTES: 0.0}


def _seconds(row: Features, factors: dict[str, float]) -> float:
    """Predicted."""
    return sum(factors[name] * value for name, value in _longer(row, factors).items())


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
