# ruff: noqa: TID251  (timing needs torch.cuda's events directly)
"""The decode step on a GPU: captured, beside the sum of its kernels, and how busy it keeps the card.

    python benchmarks/step.py --sections mini,mix --out benchmarks/results

`mini`: the embedded model answers its recorded samples in one process that prefills for itself, without drafts and
with them, recorded steps and eager ones; the answers are held against those an independent float32 implementation
gave. `mix`: K3's own widths at reduced depth (`stand_in.py`). A captured step is timed by replaying it back to
back; its kernels' own times are the profiler's; the wall time is that of the whole loop, two steps in flight.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import shlex
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import step_cpu
import torch
import triton
from harness import bars
from stand_in import stand_in
from step_mix import ROOM, mix_step
from torch.profiler import ProfilerActivity, profile

from decode_svc.rank.alone import Alone
from decode_svc.rank.cuda_graphs import DRAWN, FILTERED, GREEDY, CudaGraphs, Sizes
from decode_svc.rank.graphs import StepKey, generous
from decode_svc.request import RequestSpec
from k3.config import load
from k3.config.commandline import ENGINE_ALIASES, parse
from k3.config.resolve import EMBEDDED_MODEL
from k3.config.tree import EngineConfig
from k3.device import open_device
from k3.types import RequestId, SamplingParams, StopParams

HERE = Path(__file__).parent
REPEATS = 50
SAMPLES = json.loads((EMBEDDED_MODEL / "samples.json").read_text())
HOW = {
    "greedy": (SamplingParams(temperature=0.0), GREEDY),
    "drawn": (SamplingParams(temperature=1.0), DRAWN),
    "filtered": (SamplingParams(temperature=1.0, top_p=0.95, top_k=40), FILTERED),
}
MODES = {"plain": (), "DSpark": ("--drafter", "draft-mla", "--draft-tokens", "7")}


@dataclass(frozen=True, slots=True)
class StepTime:
    """One captured step. Microseconds; `wall_us` of the loop that launches it with two steps in flight."""

    case: str
    captured_us: float
    kernels_us: float
    n_kernels: int
    wall_us: float
    largest: tuple[
        tuple[str, int, float], ...
    ]  # kernels by their share: name, launches, microseconds

    @property
    def idle(self) -> float:
        """Share of the wall time in which the card has no step."""
        return max(0.0, 1 - self.captured_us / self.wall_us)


def captured_us(replay: Callable[[], None]) -> float:
    """Mean of `REPEATS` replays back to back, the best of three such runs."""
    best = float("inf")
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(REPEATS):
            replay()
        end.record()
        end.synchronize()
        best = min(best, 1e3 * start.elapsed_time(end) / REPEATS)
    return best


def own_times(
    replay: Callable[[], None], n: int = 10
) -> tuple[float, int, tuple[tuple[str, int, float], ...]]:
    """Kernels of one replay: their times added up in microseconds, how many, and those that take most."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(n):
            replay()
        torch.cuda.synchronize()
    by_name: dict[str, list[float]] = defaultdict(list)
    for event in seen.events() or []:
        if event.device_type.name == "CUDA":
            by_name[event.name].append(event.time_range.elapsed_us())
    rows = sorted(
        ((name, len(times) // n, sum(times) / n) for name, times in by_name.items()),
        key=lambda row: -row[2],
    )
    return sum(row[2] for row in rows), sum(row[1] for row in rows), tuple(rows[:30])


def replay_of(runner: CudaGraphs, key: StepKey) -> Callable[[], None]:
    """Replays a recorded step; tokens move on with every one."""
    return lambda: runner.run(key, lambda: None)


# ------------------------------------------------------------------ the embedded model


@dataclass(frozen=True, slots=True)
class Answers:
    """The samples answered one at a time. decode_s: without prefill."""

    case: str
    n_right: int
    n_tokens: int
    n_steps: int
    decode_s: float

    @property
    def rate(self) -> float:
        """Tokens per second of decoding."""
        return self.n_tokens / self.decode_s


def engine(dtype: str, *flags: str) -> Alone:
    """The embedded model on the first GPU, one request at a time."""
    words = (
        *("--preset", "tiny-demo", "--model-device", "cuda", "--model-dtype", dtype),
        *("--max-rows", "1", "--model-max-model-len", "2000", "--schedule-max-queue", "99"),
    )
    line = parse("k3-decode", EngineConfig, ENGINE_ALIASES, [*words, *flags])
    return Alone(load.load_engine("decode", line, {}).require())


def asked(n_tokens: int | None = None) -> list[RequestSpec]:
    """Every short sample, or the first alone with a longer answer."""
    short = [s for s in SAMPLES if len(s["prompt_ids"]) + len(s["answer_ids"]) < 2000]
    return [
        RequestSpec(
            RequestId(str(i)),
            tuple(sample["prompt_ids"]),
            SamplingParams(temperature=0.0),
            StopParams(n_tokens or len(sample["answer_ids"])),
        )
        for i, sample in enumerate(short if n_tokens is None else short[:1])
    ]


def answers(case: str, alone: Alone) -> Answers:
    """All samples, after one of them unmeasured."""
    right = {tuple(s["prompt_ids"]): s["answer_ids"] for s in SAMPLES}
    alone.answer(asked()[:1])
    t = alone.totals
    before = (t.seconds - t.fill_s, t.n_steps)
    found = [(r.spec.prompt, [x.id for x in r.outputs]) for r in alone.answer(asked())]
    return Answers(
        case,
        sum(right[prompt] == ids for prompt, ids in found),
        sum(len(ids) for _, ids in found),
        t.n_steps - before[1],
        t.seconds - t.fill_s - before[0],
    )


def wall_us(alone: Alone) -> float:
    """Of a step of the loop in the middle of a long answer: the difference of a longer and a shorter one.

    The longer one leaves room for the replays that follow: each moves its row on by up to eight tokens.
    """
    seen: list[tuple[float, int]] = []
    for n_tokens in (100, 500):
        t = alone.totals
        before = (t.seconds - t.fill_s, t.n_steps)
        alone.answer(asked(n_tokens))
        seen.append((t.seconds - t.fill_s - before[0], t.n_steps - before[1]))
    (short_s, n_short), (long_s, n_long) = seen
    return 1e6 * (long_s - short_s) / (n_long - n_short)


def mini(report: Report) -> None:
    """The embedded model: answers and steps, every mode."""
    for dtype in ("bfloat16", "float32"):
        for mode, flags in MODES.items():
            alone = engine(dtype, *flags)
            report.answers.append(answers(f"{mode}, {dtype}, recorded", alone))
            if dtype == "bfloat16":
                report.steps.append(_mini_step(f"k3-mini {mode}, 1 row", alone))
            report.write()
    for mode, flags in MODES.items():
        alone = engine("bfloat16", "--backends-graphs", "off", *flags)
        report.answers.append(answers(f"{mode}, bfloat16, eager", alone))
        report.write()


def _mini_step(case: str, alone: Alone) -> StepTime:
    wall = wall_us(alone)
    runner = alone.runner
    assert isinstance(runner, CudaGraphs)
    group = runner.sizes.groups[-1]
    key = StepKey(1, runner.bound(512), generous(GREEDY), group, proposes=True)
    return _step_time(case, replay_of(runner, key), wall)


def _step_time(case: str, replay: Callable[[], None], wall: float) -> StepTime:
    captured = captured_us(replay)
    kernels, n_kernels, largest = own_times(replay)
    return StepTime(case, captured, kernels, n_kernels, wall, largest)


# ------------------------------------------------------------------ K3's widths


def mix(report: Report) -> None:
    """9 KDA and 3 MLA layers: plain steps and verify groups of 8."""
    device = open_device("cuda", 1)
    stage = stand_in()
    for how, (n_rows, length, group) in itertools.product(report.draws, report.shapes):
        sampling, flavour = HOW[how]
        runner = CudaGraphs(device, Sizes.up_to(n_rows, length + ROOM, group), 8)
        step = mix_step(stage, device, runner, n_rows, length, group, sampling)
        rows = range(1, n_rows + 1)
        earlier = step.launch(rows, length)
        started = time.perf_counter()
        for _ in range(REPEATS):
            newer = step.launch(rows, length)
            earlier.tokens()
            earlier = newer
        earlier.tokens()
        wall = 1e6 * (time.perf_counter() - started) / REPEATS
        key = StepKey(n_rows, runner.bound(length + group), generous(flavour), group, proposes=True)
        case = f"K3 mix, {n_rows} rows of {length}, {group} tokens, {how}"
        report.steps.append(_step_time(case, replay_of(runner, key), wall))
        report.write()
        del step, runner


# ------------------------------------------------------------------ report


class Report:
    """What was measured so far, written after every part: a late hang loses nothing."""

    def __init__(
        self, path: Path, shapes: Sequence[tuple[int, int, int]], draws: Sequence[str], top: int
    ) -> None:
        self.path, self.shapes, self.draws, self.top = path, shapes, draws, top
        self.answers: list[Answers] = []
        self.steps: list[StepTime] = []

    def text(self) -> str:
        """Markdown."""
        lines = [
            f"# Decode steps on {torch.cuda.get_device_name()}, {datetime.now(UTC):%Y-%m-%d}",
            "",
            f"torch {torch.__version__}, triton {triton.__version__}, CUDA {torch.version.cuda}, Python "
            f"{platform.python_version()}.",
            "",
            f"    {shlex.join(['python', 'benchmarks/step.py', *sys.argv[1:]])}",
            "",
            "## Steps",
            "",
            "| step | captured us | kernels us | ratio | kernels | loop us | GPU idle |",
            "|---|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {s.case} | {s.captured_us:.0f} | {s.kernels_us:.0f} | {s.captured_us / s.kernels_us:.3f} | "
            f"{s.n_kernels} | {s.wall_us:.0f} | {s.idle:.1%} |"
            for s in self.steps
        ]
        if self.answers:
            lines += [
                "",
                "## Answers of the embedded model, one request at a time",
                "",
                "| steps | right answers | tokens | steps | tokens a step | decode s | tokens/s | to plain |",
                "|---|---|---|---|---|---|---|---|",
                *map(self._answer, self.answers),
            ]
        for step in self.steps if self.top else ():
            lines += ["", f"Largest kernels of {step.case}:", ""]
            lines += [f"    {us:8.1f} us {n:4d} x  {name[:90]}" for name, n, us in step.largest]
        return "\n".join(lines) + "\n"

    def _answer(self, a: Answers) -> str:
        plain = a.case.replace("DSpark", "plain")
        base = next((x.rate for x in self.answers if x.case == plain), a.rate)
        return (
            f"| {a.case} | {a.n_right} of {len(asked())} | {a.n_tokens} | {a.n_steps} | "
            f"{a.n_tokens / a.n_steps:.2f} | {a.decode_s:.3f} | {a.rate:.0f} | {a.rate / base:.2f} |"
        )

    def write(self) -> None:
        """To the file, with a picture of the steps beside it."""
        self.path.write_text(f"{self.text()}\n{self.plot()}\n" if self.steps else self.text())

    def plot(self) -> str:
        """Draws the steps; returns Markdown that shows them."""
        series = {
            "captured": [s.captured_us for s in self.steps],
            "its kernels": [s.kernels_us for s in self.steps],
            "loop": [s.wall_us for s in self.steps],
        }
        cases = [s.case for s in self.steps]
        return bars(self.path.with_suffix(".png"), cases, series, "microseconds", is_log=True)


def _shape(word: str) -> tuple[int, int, int]:
    n_rows, length, group = map(int, word.split("x"))
    return n_rows, length, group


def main() -> None:
    """Measure, print, write; exit status 1 when an answer was wrong."""
    if "--cpu" in sys.argv:
        return step_cpu.main([word for word in sys.argv[1:] if word != "--cpu"])
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="on a CPU; --cpu --help tells more")
    parser.add_argument("--sections", default="mini,mix")
    parser.add_argument("--shapes", default="32x32768x8,32x32768x1,8x4096x8", help="of the mix")
    parser.add_argument("--draws", default="greedy", help=f"of the mix: {', '.join(HOW)}")
    parser.add_argument("--top", action="store_true", help="list the kernels that take most")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("steps are measured on a GPU and torch sees none; run this on one")
    shapes = [_shape(word) for word in arguments.shapes.split(",")]
    arguments.out.mkdir(parents=True, exist_ok=True)
    card = torch.cuda.get_device_name().lower().replace(" ", "-")
    path = arguments.out / f"{datetime.now(UTC):%Y-%m-%d}-step-{card}.md"
    report = Report(path, shapes, arguments.draws.split(","), arguments.top)
    sections = {"mini": mini, "mix": mix}
    for name in arguments.sections.split(","):
        sections[name](report)
    print(report.text())
    raise SystemExit(1 if any(a.n_right < len(asked()) for a in report.answers) else 0)


if __name__ == "__main__":
    main()
