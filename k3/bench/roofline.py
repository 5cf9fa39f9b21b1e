"""`k3-bench roofline`: predicted time of a decode step, tensor parallel against context parallel, and which cp to take.

Floors from closed forms (`cost.py`) for a model's config.json and a hardware description; nothing is run. Every mesh
tp x cp of the given number of GPUs is listed; the recommended one is the fastest whose caches hold the asked context.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from k3.bench.cost import (
    PRESETS,
    Hardware,
    Layout,
    Load,
    Sizes,
    StepCost,
    break_even,
    capacity,
    step_cost,
)
from k3.errors import ConfigError
from k3.model.spec import K3Spec

PARTS = {  # of a step, and their headings
    "mla_weights": "mla",
    "mla_attention": "keys",
    "mla_all_to_all": "a2a",
    "kda": "kda",
    "moe": "moe",
    "all_reduce": "reduce",
    "lm_head": "head",
}


@dataclass(frozen=True, slots=True)
class Choice:
    """One mesh under the asked load. capacity: tokens of the whole group, None when the memory is unknown."""

    layout: Layout
    cost: StepCost
    capacity: int | None
    fits: bool


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Flags of this subcommand."""
    p.add_argument("--model", type=Path, required=True, help="config.json, or a folder with one")
    p.add_argument(
        "--hardware",
        default="h200_nvlink",
        help=f"{', '.join(PRESETS)}, or a JSON file with {', '.join(f.name for f in fields(Hardware))}",
    )
    p.add_argument("--gpus", type=int, default=16, help="ranks of the decode group")
    p.add_argument("--context", type=int, default=131072, help="tokens in the caches per request")
    p.add_argument("--batch", type=int, default=8, help="requests of a step")
    p.add_argument("--draft", type=int, default=0, help="drafts per verify group")
    p.add_argument("--accepted", type=float, default=0.0, help="drafts accepted per step, mean")
    p.add_argument(
        "--exchange",
        choices=("value", "latent", "gather"),
        default="value",
        help="parallel.exchange",
    )
    p.add_argument("--page-tokens", type=int, default=64, help="cache.page_tokens")
    p.add_argument("--json", type=Path, help="write the figures there")


def sizes_of(model: Path) -> Sizes:
    """Sizes from a configuration. Raises ConfigError (or ModelError) naming what is wrong."""
    file = model / "config.json" if model.is_dir() else model
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model {model}: {error}; give a config.json of the family") from error
    return Sizes.of(K3Spec.from_config(config, str(file)))


def hardware_of(name: str) -> Hardware:
    """A preset, or the description in a JSON file. Raises ConfigError."""
    if name in PRESETS:
        return PRESETS[name]
    try:
        values: dict[str, Any] = json.loads(Path(name).read_text())
        return Hardware(**{key: float(value) for key, value in values.items()})
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"--hardware {name}: {error}; give one of {', '.join(PRESETS)} or a JSON file with numbers "
            f"{asdict(PRESETS['h200_nvlink'])}"
        ) from error


def choices(
    sizes: Sizes, hardware: Hardware, gpus: int, load: Load, exchange: str, page_tokens: int
) -> list[Choice]:
    """Every mesh of `gpus` ranks, ascending cp. Raises ConfigError when none divides the model."""
    for name, n in (
        ("heads", sizes.heads),
        ("KDA heads", sizes.kda_heads),
        ("experts", sizes.experts),
    ):
        if gpus < 1 or n % gpus:
            raise ConfigError(
                f"--gpus {gpus}: must divide the model's {n} {name}; choose among the common divisors"
            )
    found: list[Choice] = []
    for cp in (n for n in range(1, gpus + 1) if gpus % n == 0):
        layout = Layout(gpus // cp, cp, exchange, page_tokens)
        tokens = capacity(sizes, hardware, layout, load.batch) if hardware.memory_bytes else None
        fits = tokens is None or tokens >= load.batch * load.context
        found.append(Choice(layout, step_cost(sizes, hardware, layout, load), tokens, fits))
    return found


def recommended(found: list[Choice]) -> Choice | None:
    """The fastest mesh that fits; None when none does."""
    return min((c for c in found if c.fits), key=lambda c: c.cost.total, default=None)


def table(found: list[Choice], best: Choice | None, load: Load, accepted: float) -> Table:
    """One row per mesh, milliseconds."""
    out = Table(
        title="floor of one decode step, ms; tokens of context a group holds",
        box=None,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for name in ("", "tp", "cp", "step", *PARTS.values(), "tok/s", "holds"):
        out.add_column(name, justify="right", no_wrap=True)
    for choice in found:
        cost = choice.cost
        out.add_row(
            "*" if choice is best else "" if choice.fits else "!",
            str(choice.layout.tp),
            str(choice.layout.cp),
            f"{cost.total * 1e3:.1f}",
            *(f"{value * 1e3:.2f}" for value in parts(cost)),
            f"{load.batch * (1 + accepted) / cost.total:,.0f}",
            "-" if choice.capacity is None else f"{max(0, choice.capacity) / 1e6:.2f} M",
        )
    return out


def parts(cost: StepCost) -> list[float]:
    """Seconds in the order of `PARTS`."""
    values = asdict(cost)
    return [values[name] for name in PARTS]


def verdict(sizes: Sizes, hardware: Hardware, best: Choice | None, load: Load) -> str:
    """The recommendation in words."""
    if best is None:
        return (
            f"no mesh holds {load.batch} requests of {load.context:,} tokens beside the weights: take more "
            "GPUs, a smaller batch or a shorter context"
        )
    layout = best.layout
    spread = Layout(1, layout.ranks, layout.exchange, layout.page_tokens)
    point = break_even(sizes, hardware, spread, load) if layout.ranks > 1 else None
    words = f"recommended: parallel.tp={layout.tp} parallel.cp={layout.cp}"
    if point is None:
        return f"{words}; context parallelism does not pay at this batch"
    return f"{words}; cp={layout.ranks} beats tp={layout.ranks} from {point:,} tokens per request"


def run(args: argparse.Namespace, console: Console) -> int:
    """0 when a mesh fits, 1 when none does."""
    sizes, hardware = sizes_of(args.model), hardware_of(args.hardware)
    load = Load(args.batch, args.context, args.draft)
    found = choices(sizes, hardware, args.gpus, load, args.exchange, args.page_tokens)
    best = recommended(found)
    console.print(table(found, best, load, args.accepted))
    console.print(
        "* recommended   ! does not fit beside the weights   attention bound by "
        f"{found[0].cost.attention_bound_by} at cp=1, by {found[-1].cost.attention_bound_by} at cp={args.gpus}"
    )
    console.print(verdict(sizes, hardware, best, load))
    if args.json is not None:
        figures = [asdict(c) | {"total": c.cost.total, "recommended": c is best} for c in found]
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0 if best is not None else 1
