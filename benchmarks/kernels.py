# ruff: noqa: TID251
"""Measure every kernel and every importable peer side by side on this machine's GPU.

    python benchmarks/kernels.py --peers all --out benchmarks/results [--sections mla,kda] [--only TEXT]

Each result is checked against float64 before it is timed; a wrong one is reported and fails the run. Writes
`DATE-kernels-CARD.md` and a PNG beside it. Sections are the modules `kernel_*.py` here (`harness.Section`).
"""

from __future__ import annotations

import argparse
import importlib
import math
import platform
import shlex
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import torch
import triton
from harness import Card, Row, Section, bars, best_time, measure_card

HERE = Path(__file__).resolve().parent


def _sections(names: str) -> list[Section]:
    found = sorted(path.stem for path in HERE.glob("kernel_*.py"))
    if names != "all":
        asked = [f"kernel_{name}" for name in names.split(",")]
        unknown = sorted(set(asked) - set(found))
        if unknown:
            raise SystemExit(f"no section {', '.join(unknown)}; there are {', '.join(found)}")
        found = asked
    return [importlib.import_module(name) for name in found]  # type: ignore[misc]


def _measure(section: Section, arguments: argparse.Namespace) -> list[Row]:
    peers = set(arguments.peers.split(","))

    def wanted(peer: str) -> bool:
        return "all" in peers or peer in peers

    rows: list[Row] = []
    for case in section.cases():
        if arguments.only and arguments.only not in case.name:
            continue
        started = time.monotonic()
        new = section.run(case, wanted)
        rows += new
        line = ", ".join(f"{row.backend} {row.time_us:.1f}" for row in new)
        wrong = "".join(f" WRONG {r.backend}: {r.error:.1e}" for r in new if not r.right)
        print(f"{case.name}: {line}{wrong} ({time.monotonic() - started:.1f} s)", flush=True)
    return rows


def table(rows: list[Row], card: Card) -> str:
    """Markdown: one line a row; `ratio` is the time over the best of the case."""
    lines = [
        "| case | backend | µs | floor µs | of floor | bound | ratio to best | error | |",
        "|---|---|--:|--:|--:|---|--:|--:|---|",
    ]
    for row in rows:
        best = best_time(r for r in rows if r.case == row.case)
        floor = card.floor_us(row)
        note = row.note if row.right else f"WRONG (limit {row.error_limit:.0e}) {row.note}"
        lines.append(
            f"| {row.case} | {row.backend} | {row.time_us:.1f} | {floor:.1f} | {floor / row.time_us:.2f} "
            f"| {card.bound(row)} | {row.time_us / best:.2f} | {row.error:.1e} | {note} |"
        )
    return "\n".join(lines)


def plot(rows: list[Row], card: Card, path: Path) -> str:
    """Fraction of the floor, one group of bars per case, one colour per backend; returns Markdown that shows it."""
    cases = list(dict.fromkeys(row.case for row in rows))
    backends = list(dict.fromkeys(row.backend for row in rows))
    reached = {(row.backend, row.case): card.floor_us(row) / row.time_us for row in rows}
    series = {
        backend: [reached.get((backend, case), math.nan) for case in cases] for backend in backends
    }
    return bars(path, cases, series, f"fraction of floor, {card.name}", line=1)


def _heading(card: Card) -> str:
    return "\n".join(
        (
            f"# Kernels on {card.name}, {datetime.now(UTC):%Y-%m-%d}",
            "",
            f"Measured in this run: copy {card.bytes_per_s / 1e12:.2f} TB/s (read plus written), bfloat16 product "
            f"{card.flops_per_s / 1e12:.0f} TFLOP/s; ridge {card.flops_per_s / card.bytes_per_s:.0f} operations "
            "a byte.",
            f"torch {torch.__version__}, triton {triton.__version__}, CUDA {torch.version.cuda}, Python "
            f"{platform.python_version()}. Times are medians in microseconds with a cold L2.",
            "",
            f"    {shlex.join(['python', 'benchmarks/kernels.py', *sys.argv[1:]])}",
            "",
        )
    )


def main() -> None:
    """Measure, print, write; exit status 1 when a result was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", default="all", help="all, none, or names joined by commas")
    parser.add_argument("--sections", default="all", help="all, or names joined by commas: mla,kda")
    parser.add_argument("--only", help="cases whose name contains this")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("kernels are measured on a GPU and torch sees none; run this on one")
    sections = _sections(arguments.sections)
    card = measure_card()
    text, wrong = [_heading(card)], 0
    stem = f"{datetime.now(UTC):%Y-%m-%d}-kernels-{card.name.lower().replace(' ', '-')}"
    arguments.out.mkdir(parents=True, exist_ok=True)
    for section in sections:
        rows = _measure(section, arguments)
        wrong += sum(not row.right for row in rows)
        if not rows:
            continue
        name = section.TITLE.lower().split()[0]
        text += [f"## {section.TITLE}", "", table(rows, card), ""]
        text += [f"Not here: {line}" for line in section.missing_peers()]
        text += ["", plot(rows, card, arguments.out / f"{stem}-{name}.png"), ""]
        report = "\n".join(text)
        (arguments.out / f"{stem}.md").write_text(
            report
        )  # after each section: a late hang loses none
    print("\n".join(text))
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
