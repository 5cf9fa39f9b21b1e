"""The system validated at its own scale: prefill beside context parallel decode, drafts, graphs and overlap on.

    python benchmarks/validate.py [--gpus 2] [--parts answers,steps,transfer] [--budget-s 600] [--out FOLDER]

`answers`: the embedded model with prefill pp 2 beside decode cp N against cp 1 without drafts, over the frozen suites;
wrong configurations are refused. `steps`: decode steps of real widths by context, batch and layout, and the roofline
model calibrated by them. `transfer`: bytes between all pairs of GPUs at once, and what a prompt still waits for after
its last chunk. Figures go to a JSON file after every step; `--add FILE` keeps the parts of an earlier run that this one
does not measure, `--parts ''` only writes its table and plots again. `--device cpu` runs everything small.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import validate_answers
import validate_plot
import validate_steps
from validate_steps import Settings

HERE = Path(__file__).parent
CONTEXTS = {"cuda": "32768,4096,131072,524288", "cpu": "128,256"}
BATCHES = {"cuda": "32,1,8", "cpu": "1,2"}
TREE = dict[str, Any]


class Run:
    """Figures so far, in a JSON file that is written after every change."""

    def __init__(self, path: Path, tree: TREE) -> None:
        self.path, self.tree = path, tree
        self._started = time.monotonic()

    def say(self, text: str) -> None:
        """A line of progress."""
        print(f"[{time.monotonic() - self._started:6.1f} s] {text}", flush=True)

    def keep(self, part: str, figures: Any) -> None:
        """Replace a part."""
        self.tree["parts"][part] = figures
        self.path.write_text(json.dumps(self.tree, indent=1) + "\n")


def facts(arguments: argparse.Namespace) -> TREE:
    """What has to stand beside the figures."""
    is_gpu = arguments.device == "cuda"
    return {
        "device": torch.cuda.get_device_name() if is_gpu else platform.machine(),  # noqa: TID251
        "gpus": arguments.gpus,
        "versions": f"torch {torch.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}",
        "cores": os.cpu_count(),
        "commands": [command(sys.argv[1:])],
    }


def command(words: list[str]) -> str:
    """What was asked, without the places of files."""
    pairs = zip(["", *words], words, strict=False)
    places = ("--out", "--add")
    kept = [word for before, word in pairs if not {before, word} & set(places)]
    return shlex.join(["python", "benchmarks/validate.py", *kept])


def steps(arguments: argparse.Namespace, run: Run, end: float) -> None:
    """Part `steps`."""
    settings = Settings(
        arguments.device,
        arguments.gpus,
        arguments.depth,
        numbers(arguments.contexts or CONTEXTS[arguments.device]),
        numbers(arguments.batches or BATCHES[arguments.device]),
        tuple(n for n in numbers(arguments.ranks) if n <= arguments.gpus),
        0.15 if arguments.device == "cuda" else 0.01,
        numbers(arguments.alone),
    )
    validate_steps.measure(settings, end, run.say, lambda figures: run.keep("steps", figures))


def answers(arguments: argparse.Namespace, run: Run, end: float) -> None:
    """Part `answers`."""
    precision = ("--model-dtype", arguments.dtype) if arguments.dtype else ()
    settings = validate_answers.Settings(
        arguments.device,
        arguments.gpus,
        arguments.suites,
        arguments.items,
        arguments.concurrency,
        precision,
    )
    validate_answers.measure(settings, end, run.say, lambda figures: run.keep("answers", figures))


def transfer(arguments: argparse.Namespace, run: Run, end: float) -> None:
    """Part `transfer`; without another device or without nixl there is none."""
    del end
    if arguments.gpus < 2:
        run.say("transfer: left out: it takes two devices")
        return
    import validate_transfer

    n_bytes = int(arguments.pool_gib * (1 << 30))
    validate_transfer.measure(
        arguments.device,
        arguments.gpus,
        n_bytes,
        run.say,
        lambda figures: run.keep("transfer", figures),
    )


def transfer_lines(part: TREE) -> list[str]:
    """Markdown of part `transfer`."""
    import validate_transfer

    return validate_transfer.lines(part)


PARTS: Mapping[str, Callable[[argparse.Namespace, Run, float], None]] = {
    "answers": answers,
    "steps": steps,
    "transfer": transfer,
}
TITLES = {
    "answers": ("Answers", validate_answers.lines),
    "steps": ("Decode steps", validate_steps.lines),
    "transfer": ("Transfers", transfer_lines),
}


def numbers(text: str) -> tuple[int, ...]:
    """Of `1,2,4`."""
    return tuple(int(word) for word in text.split(",") if word)


def arguments_of(words: list[str] | None = None) -> argparse.Namespace:
    """The command line; refuses what cannot be measured here."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gpus", type=int, default=0, help="0 = all visible; processes on a CPU")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--budget-s", type=float, default=600.0, help="of each part")
    parser.add_argument("--suites", default="all", help="of the answers, as of k3-bench eval")
    parser.add_argument("--items", type=int, default=20, help="of each suite; 0 = all")
    parser.add_argument("--concurrency", type=int, default=16, help="requests in flight")
    parser.add_argument("--dtype", default="", help="of the answers; empty = the preset's")
    parser.add_argument("--contexts", default="", help="of the steps, tokens of each request")
    parser.add_argument("--batches", default="", help="of the steps, requests")
    parser.add_argument("--ranks", default="1,2,4,8", help="sizes of decode groups, as they fit")
    parser.add_argument(
        "--alone", default="8", help="sizes of groups one rank of which is timed without messages"
    )
    parser.add_argument("--depth", type=int, default=12, help="layers of the stand-in")
    parser.add_argument("--pool-gib", type=float, default=4.0, help="of each device's transfers")
    parser.add_argument("--add", type=Path, help="JSON of an earlier run, for parts not run now")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    arguments = parser.parse_args(words)
    visible = torch.cuda.device_count() if arguments.device == "cuda" else 2  # noqa: TID251
    arguments.gpus = arguments.gpus or visible
    if arguments.parts and arguments.device == "cuda" and not 1 <= arguments.gpus <= visible:
        parser.error(f"--gpus {arguments.gpus}: torch sees {visible}; give 1 to {visible}")
    unknown = set(filter(None, arguments.parts.split(","))) - PARTS.keys()
    if unknown:
        parser.error(f"--parts {', '.join(sorted(unknown))}: expected some of {', '.join(PARTS)}")
    return arguments


def main() -> None:
    """Measure part by part, then write table and plots; exit status 1 when answers or bytes are wrong."""
    arguments = arguments_of()
    arguments.out.mkdir(parents=True, exist_ok=True)
    earlier: TREE = json.loads(arguments.add.read_text()) if arguments.add else {}
    wanted = list(filter(None, arguments.parts.split(",")))
    about = earlier.get("facts", {}) if not wanted else facts(arguments)
    if wanted and earlier:
        about["commands"] = [*earlier["facts"]["commands"], *about["commands"]]
    card = about["device"].lower().replace(" ", "-")
    stem = f"{datetime.now(UTC):%Y-%m-%d}-validate-{card}-x{about['gpus']}"
    run = Run(
        arguments.out / f"{stem}.json", {"facts": about, "parts": earlier.get("parts", {}) or {}}
    )
    for name in wanted:
        PARTS[name](arguments, run, time.monotonic() + arguments.budget_s)
    text = report(run.tree)
    (arguments.out / f"{stem}.md").write_text(text)
    if run.tree["parts"].get("steps", {}).get("points") and find_spec("matplotlib"):
        validate_plot.plot(run.tree["parts"]["steps"], arguments.out / f"{stem}.png")
    print(text)
    wrong = problems(run.tree["parts"])
    for problem in wrong:
        print(f"PROBLEM: {problem}")
    raise SystemExit(1 if wrong else 0)


def problems(parts: TREE) -> list[str]:
    """What is not as it must be, speed aside."""
    found: list[str] = []
    if "answers" in parts:
        found += validate_answers.problems(parts["answers"])
    if "transfer" in parts:
        import validate_transfer

        found += validate_transfer.problems(parts["transfer"])
    return found


def report(tree: TREE) -> str:
    """Markdown."""
    about = tree["facts"]
    lines = [
        f"# Validation on {about['gpus']} x {about['device']}, {datetime.now(UTC):%Y-%m-%d}",
        "",
        f"{about['versions']}, {about['cores']} cores.",
        "",
        *(f"    {command}" for command in about["commands"]),
    ]
    for name, (title, write) in TITLES.items():
        if name in tree["parts"]:
            lines += ["", f"## {title}", "", *write(tree["parts"][name])]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
