"""llama.cpp beside ours on a CPU: `python benchmarks/step.py --cpu --compare llama.cpp`.

The embedded model, one sequence, greedy, the same tokens asked of everyone. llama.cpp runs in a child
(`llama_child.py`) from GGUF files made here (`k3_gguf.py`), in three forms: float32 without flash attention, which is
our arithmetic; float32 with flash attention, its default, which rounds to float16; weights as stored, where bfloat16
and MXFP4 weights meet rounded activations. All take turns answer by answer, and of each answer the fastest turn counts,
which other processes disturb least. An answer's time leaves out the prompt and the token that comes with it; ours
contains scheduler and sampling, llama.cpp's an argmax.

llama.cpp decodes plainly: its `draft-dspark` reads inputs of the target's layers (`t_layer_inp`), which its graph of
this architecture (`src/models/kimi-k3.cpp`) does not hand out.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from k3_gguf import convert
from k3_kernels.api import Backends, select
from llama_child import LOGITS, LlamaCpp, Sample, Timed

from decode_svc.rank.alone import Alone
from decode_svc.request import RequestSpec
from k3.config import load
from k3.config.commandline import ENGINE_ALIASES, parse
from k3.config.resolve import EMBEDDED_MODEL
from k3.config.tree import EngineConfig
from k3.model.registry import open_stage
from k3.parallel.collectives import solo_groups
from k3.parallel.mesh import SOLO
from k3.types import RequestId, SamplingParams, StopParams
from tests.model_runner import Pools

LLAMA = {  # name -> (weights as stored, flash attention)
    "llama.cpp, float32": (False, False),
    "llama.cpp, float32, flash attention": (False, True),
    "llama.cpp, weights as stored": (True, True),
}
REFERENCE = tuple(
    word for part in ("attention", "kda", "moe") for word in (f"--backends-{part}", "reference")
)
OURS = {
    "eager torch": REFERENCE,
    "native": (),
    "native, DSpark": ("--drafter", "draft-mla", "--draft-tokens", "7"),
}
YARDSTICK, BEST = "llama.cpp, float32", "native, DSpark"
THREADS = (1, 2)


class Contender(Protocol):
    """Someone who answers samples."""

    def answer(self, sample: Sample, threads: int) -> Timed:
        """Greedy, as many tokens as recorded."""
        ...


def samples() -> list[Sample]:
    """Those with short prompts: this compares decoding."""
    listed = json.loads((EMBEDDED_MODEL / "samples.json").read_text(encoding="utf-8"))
    found = [Sample(tuple(s["prompt_ids"]), tuple(s["answer_ids"])) for s in listed]
    return [s for s in found if len(s.prompt) < 200]


class Ours:
    """One process that prefills for itself."""

    def __init__(self, *flags: str) -> None:
        """flags: as of `k3-decode`."""
        words = ("--preset", "tiny-demo", "--max-rows", "1", "--cache-memory-bytes", "64MiB")
        line = parse("k3-decode", EngineConfig, ENGINE_ALIASES, [*words, *flags])
        self.alone = Alone(load.load_engine("decode", line, {}).require())

    def answer(self, sample: Sample, threads: int) -> Timed:
        """With `threads` threads in what torch computes; the native library has one."""
        torch.set_num_threads(threads)
        spec = RequestSpec(
            RequestId("sample"),
            sample.prompt,
            SamplingParams(temperature=0.0),
            StopParams(len(sample.answer)),
        )
        t = self.alone.totals
        before = t.seconds - t.fill_s
        [request] = self.alone.answer([spec])
        ids = tuple(token.id for token in request.outputs)
        return Timed(ids, t.seconds - t.fill_s - before)


# ------------------------------------------------------------------ measuring


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast one contender answers all samples, with how many of them right."""

    name: str
    threads: int
    n_right: int
    tokens_per_s: float


def rates(contenders: Mapping[str, Contender], threads: int, turns: int) -> list[Rate]:
    """Everyone answers every sample `turns` times, in turns; the fastest of each counts."""
    asked = samples()
    best = {name: [float("inf")] * len(asked) for name in contenders}
    wrong: dict[str, set[int]] = {name: set() for name in contenders}
    for _ in range(turns):
        for i, sample in enumerate(asked):
            for name, contender in contenders.items():
                timed = contender.answer(sample, threads)
                best[name][i] = min(best[name][i], timed.seconds)
                if timed.ids != sample.answer:
                    wrong[name].add(i)
    n_tokens = sum(len(s.answer) - 1 for s in asked)
    return [
        Rate(name, threads, len(asked) - len(wrong[name]), n_tokens / sum(best[name]))
        for name in contenders
    ]


def step_times(steps: Mapping[str, Callable[[], Sequence[float]]], turns: int) -> dict[str, float]:
    """Lower decile of what each gives in `turns` turns, in milliseconds."""
    seen: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(turns):
        for name, step in steps.items():
            seen[name] += step()
    return {name: 1e3 * sorted(times)[len(times) // 10] for name, times in seen.items()}


@torch.inference_mode()
def our_logits(ids: Sequence[int]) -> torch.Tensor:
    """[positions, vocabulary] of the last `LOGITS` positions, torch reference in float32."""
    cpu = torch.device("cpu")
    ops = select(Backends("reference", "reference", "reference"), cpu)
    stage = open_stage(EMBEDDED_MODEL, SOLO, solo_groups(), ops, dtype="float32", device=cpu)
    pools = Pools(stage, 1, len(ids), page_tokens=16)
    output = pools.chunk([(pools.requests[0], ids)])
    return stage.logits(stage.hidden(output.frame))[-LOGITS:]


# ------------------------------------------------------------------ report


def cpu_name() -> str:
    """As Linux calls it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def step_table(times: Mapping[str, float]) -> list[str]:
    """Milliseconds per model step."""
    lines = ["| model step | ms | llama.cpp, float32 / this |", "| --- | ---: | ---: |"]
    return lines + [
        f"| {name} | {ms:.2f} | {times[YARDSTICK] / ms:.2f} |" for name, ms in times.items()
    ]


def rate_table(found: Sequence[Rate]) -> list[str]:
    """Tokens per second."""
    base = {rate.threads: rate.tokens_per_s for rate in found if rate.name == YARDSTICK}
    lines = [
        "| answers | threads | right | tokens/s | this / llama.cpp, float32 |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    return lines + [
        f"| {r.name} | {r.threads} | {r.n_right} of {len(samples())} | {r.tokens_per_s:.0f} | "
        f"{r.tokens_per_s / base[r.threads]:.2f} |"
        for r in found
    ]


def ratios(times: Mapping[str, float], found: Sequence[Rate]) -> list[str]:
    """What the tables come to."""
    lines = [
        f"- step, native to eager torch: {times['eager torch'] / times['native']:.1f} times as fast"
    ]
    for name in LLAMA:
        at_1 = _fastest(found, BEST, {1}) / _fastest(found, name, {1})
        at_best = _fastest(found, BEST, THREADS) / _fastest(found, name, THREADS)
        lines.append(
            f"- tokens/s, {BEST} to {name}: {at_1:.2f} with one thread, {at_best:.2f} with the best number of each"
        )
    return lines


def _fastest(found: Sequence[Rate], name: str, threads: Collection[int]) -> float:
    return max(r.tokens_per_s for r in found if r.name == name and r.threads in threads)


def open_theirs(python: Path) -> dict[str, LlamaCpp]:
    """llama.cpp in every form; the files are gone once they are loaded."""
    with tempfile.TemporaryDirectory() as folder:
        paths = {is_stored: Path(folder, f"{is_stored}.gguf") for is_stored in (False, True)}
        for is_stored, path in paths.items():
            convert(EMBEDDED_MODEL, path, is_stored=is_stored)
        return {
            name: LlamaCpp(python, paths[is_stored], has_flash=has_flash)
            for name, (is_stored, has_flash) in LLAMA.items()
        }


def agreement(theirs: Mapping[str, LlamaCpp]) -> list[str]:
    """How far the logits of a recorded prompt and answer are from ours."""
    sample = samples()[0]
    ids = sample.prompt + sample.answer
    logits = our_logits(ids)
    lines = [
        f"Largest difference to the torch reference in the logits of {LOGITS} positions "
        f"(largest logit {logits.abs().max():.0f}):",
        "",
    ]
    for name, child in theirs.items():
        difference = (torch.tensor(child.logits(ids)) - logits).abs().max()
        lines.append(f"- {name}: {difference:.1e}")
    return lines


def compare(
    out: Path,
    python: Path,
    ours: Mapping[str, Callable[[], Sequence[float]]],
    context: int,
    turns: int,
) -> bool:
    """Measure, print, write `out`. Returns whether all answers were right.

    ours: CPU seconds of some model steps with `context` tokens cached, by name.
    """
    load_before = os.getloadavg()
    theirs = open_theirs(python)
    differences = agreement(theirs)
    steps = dict(ours) | {name: partial(child.step, context) for name, child in theirs.items()}
    with torch.inference_mode():
        times = step_times(steps, 2 * turns)
    contenders: dict[str, Contender] = {name: Ours(*flags) for name, flags in OURS.items()}
    contenders |= theirs
    found = list[Rate]()
    for n in THREADS:
        found += rates(contenders, n, turns)
        contenders.pop("eager torch", None)  # with one thread only: minutes on shared cores
    about = theirs[YARDSTICK].about
    for child in theirs.values():
        child.close()
    text = [
        f"# Decoding on a CPU beside llama.cpp, {datetime.now(UTC):%Y-%m-%d}",
        "",
        "- model: k3-mini as shipped, one sequence, greedy; ours in float32",
        f"- machine: {cpu_name()}, {os.cpu_count()} cores; load before {load_before[0]:.1f}, after "
        f"{os.getloadavg()[0]:.1f}",
        f"- versions: torch {torch.__version__}; llama-cpp-python {about['version']}, {about['system']}",
        f"- command: `{shlex.join(['python', 'benchmarks/step.py', *sys.argv[1:]])}`",
        "",
        *ratios(times, found),
        "",
        f"Model step, {context} tokens cached, one thread, CPU time, lower decile:",
        "",
        *step_table(times),
        "",
        f"Recorded samples, one at a time, without prompt and first token, fastest of {turns} turns each:",
        "",
        *rate_table(found),
        "",
        *differences,
    ]
    out.write_text("\n".join(text) + "\n", encoding="utf-8")
    print("\n".join(text), flush=True)
    return all(rate.n_right == len(samples()) for rate in found)
