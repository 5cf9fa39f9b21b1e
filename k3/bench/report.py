"""From records to figures: percentiles, throughput, goodput; as JSON, as a table, as a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from k3.bench.load import Record

QUANTILES = (0.5, 0.9, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class Slo:
    """What a good request is: first token and mean time per token within these."""

    ttft_s: float
    tpot_s: float

    def is_met(self, record: Record) -> bool:
        """Whether a complete request keeps both."""
        return record.ttft_s <= self.ttft_s and record.tpot_s <= self.tpot_s


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles of one quantity, seconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


def quantile(ordered: Sequence[float], q: float) -> float:
    """Linear interpolation between the closest ranks of an ascending sequence; 0 when empty."""
    if not ordered:
        return 0.0
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def spread(values: Sequence[float]) -> Spread:
    """Of any sequence; all zero when empty."""
    ordered = sorted(values)
    if not ordered:
        return Spread(0, 0, 0, 0, 0, 0)
    mean = sum(ordered) / len(ordered)
    p50, p90, p95, p99 = (quantile(ordered, q) for q in QUANTILES)
    return Spread(mean, p50, p90, p95, p99, ordered[-1])


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of one run."""

    n_requests: int
    n_complete: int
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    slo: Slo
    goodput_per_s: float
    share_within_slo: float
    ttft_s: Spread
    itl_s: Spread
    tpot_s: Spread
    e2e_s: Spread
    errors: dict[str, int]
    finish: dict[str, int]

    def as_json(self, settings: dict[str, Any]) -> dict[str, Any]:
        """A plain tree; `settings` says what was run."""
        return {"settings": settings, **asdict(self)}


def summarize(records: Sequence[Record], slo: Slo) -> Report:
    """Figures over complete requests; errors are counted by kind."""
    complete = [r for r in records if not r.error]
    duration = max((r.started_s + r.total_s for r in records), default=0.0)
    per_s = 1.0 / duration if duration > 0 else 0.0
    n_good = sum(slo.is_met(r) for r in complete)
    output = sum(r.output_tokens for r in complete)
    return Report(
        n_requests=len(records),
        n_complete=len(complete),
        duration_s=duration,
        prompt_tokens=sum(r.prompt_tokens for r in complete),
        output_tokens=output,
        requests_per_s=len(complete) * per_s,
        output_tokens_per_s=output * per_s,
        slo=slo,
        goodput_per_s=n_good * per_s,
        share_within_slo=n_good / len(records) if records else 0.0,
        ttft_s=spread([r.ttft_s for r in complete]),
        itl_s=spread([g for r in complete for g in r.gaps_s]),
        tpot_s=spread([r.tpot_s for r in complete if r.output_tokens > 1]),
        e2e_s=spread([r.total_s for r in complete]),
        errors=dict(Counter(r.error for r in records if r.error)),
        finish=dict(Counter(r.finish_reason for r in complete)),
    )


def table(report: Report) -> Table:
    """Latencies in milliseconds; the other figures in the caption."""
    out = Table(title=f"{report.n_complete} of {report.n_requests} requests complete")
    for name in ("ms", "mean", "p50", "p90", "p95", "p99", "max"):
        out.add_column(name, justify="left" if name == "ms" else "right")
    rows = (("TTFT", report.ttft_s), ("ITL", report.itl_s), ("TPOT", report.tpot_s))
    for name, values in (*rows, ("end to end", report.e2e_s)):
        out.add_row(name, *(f"{v * 1e3:.1f}" for v in asdict(values).values()))
    slo = f"TTFT {report.slo.ttft_s * 1e3:.0f} ms, TPOT {report.slo.tpot_s * 1e3:.0f} ms"
    out.caption = (
        f"{report.duration_s:.1f} s | {report.requests_per_s:.2f} requests/s | "
        f"{report.output_tokens_per_s:.1f} tokens/s | goodput {report.goodput_per_s:.2f}/s "
        f"({report.share_within_slo:.0%} within {slo}) | errors {report.errors or 'none'}"
    )
    return out


def plot(records: Sequence[Record], path: Path) -> None:
    """PNG: distributions of TTFT and ITL, and tokens per second over the run."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    plt: Any = pyplot  # its stubs are partial
    complete = [r for r in records if not r.error]
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    panels = (
        ("TTFT", [r.ttft_s * 1e3 for r in complete]),
        ("ITL", [g * 1e3 for r in complete for g in r.gaps_s]),
    )
    for axis, (name, values) in zip(axes, panels, strict=False):
        ordered = sorted(values)
        axis.plot(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))])
        axis.set(title=name, xlabel="ms", ylabel="share of values at most", ylim=(0, 1))
        axis.grid(alpha=0.3)
    axes[2].hist([t for r in complete for t in _token_times(r)], bins=40, color="tab:green")
    axes[2].set(title="output tokens over the run", xlabel="s", ylabel="tokens per bin")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _token_times(record: Record) -> list[float]:
    at = record.started_s + record.ttft_s
    times = [at]
    for gap in record.gaps_s:
        at += gap
        times.append(at)
    return times
