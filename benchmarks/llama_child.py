"""llama.cpp as a child process: `llama_worker.py` in an interpreter that has llama-cpp-python, and how to get one."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import Any

HERE = Path(__file__).parent
LOGITS = 64  # positions compared of a prompt and its answer
REPLY_S, END_S = 600.0, 10.0  # deadlines of a reply, and of a child's end
VERSION = "0.3.36"  # the first one seen with the architecture kimi-k3
OWN = HERE.parent / ".llama" / "bin" / "python"
INSTALL = f"""llama.cpp is not importable by {{tried}}. It is built from source, for this comparison only (a C++
compiler, about six minutes on two cores):
    python -m venv .llama
    CMAKE_ARGS=-DLLAVA_BUILD=OFF .llama/bin/pip install --no-binary llama-cpp-python llama-cpp-python=={VERSION}
An interpreter that has it elsewhere is named by --llama-python."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A recorded prompt and the answer an independent float32 implementation gave."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Timed:
    """An answer. seconds: of its tokens after the first."""

    ids: tuple[int, ...]
    seconds: float


class LlamaCpp:
    """A child with a model open."""

    def __init__(self, python: Path, model: Path, *, has_flash: bool) -> None:
        """Raises SystemExit with its last words when it does not start."""
        flash = "flash" if has_flash else "exact"
        self.command = [str(python), str(HERE / "llama_worker.py"), str(model), flash]
        self.child = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.about = self._reply()

    def _reply(self) -> dict[str, Any]:
        """A child that says nothing for `REPLY_S` is killed, which ends its output."""
        assert self.child.stdout is not None, "a pipe was asked for"
        overdue = Timer(REPLY_S, self.child.kill)
        overdue.daemon = True
        overdue.start()
        line = self.child.stdout.readline()
        overdue.cancel()
        if not line.endswith("\n"):
            raise SystemExit(
                f"{shlex.join(self.command)}: exit status {self._ended()} (-9: no reply in {REPLY_S:g} s), see above; "
                f"llama-cpp-python {VERSION} is known to work"
            )
        return json.loads(line)

    def ask(self, **request: Any) -> dict[str, Any]:
        """One request, one reply."""
        assert self.child.stdin is not None, "a pipe was asked for"
        self.child.stdin.write(json.dumps(request) + "\n")
        self.child.stdin.flush()
        return self._reply()

    def answer(self, sample: Sample, threads: int) -> Timed:
        """Prompt and tokens one by one."""
        reply = self.ask(op="answer", prompt=sample.prompt, n=len(sample.answer), threads=threads)
        return Timed(tuple(reply["ids"]), reply["seconds"])

    def step(self, context: int) -> list[float]:
        """CPU seconds of ten single tokens after `context` others, one thread."""
        ids = [i % 3800 for i in range(context)]
        return self.ask(op="step", prompt=ids, n=10, threads=1)["cpu_seconds"]

    def logits(self, ids: Sequence[int]) -> list[list[float]]:
        """[positions, vocabulary] of the last `LOGITS` positions."""
        return self.ask(op="logits", prompt=ids, n=LOGITS, threads=1)["logits"]

    def close(self) -> None:
        """The child ends when its input does."""
        assert self.child.stdin is not None, "a pipe was asked for"
        self.child.stdin.close()
        self._ended()

    def _ended(self) -> int:
        """Exit status; who has not ended in `END_S` is killed."""
        with suppress(subprocess.TimeoutExpired):
            return self.child.wait(END_S)
        self.child.kill()
        return self.child.wait()


def interpreter(named: Path | None) -> Path:
    """One that imports llama_cpp. Prints how to install it and exits with status 2 when there is none."""
    tried = [named] if named is not None else [Path(sys.executable), OWN]
    for python in tried:
        if python.is_file():
            command = [str(python), "-c", "import llama_cpp"]
            done = subprocess.run(command, capture_output=True, check=False, timeout=REPLY_S)
            if done.returncode == 0:
                return python
    print(INSTALL.format(tried=" or ".join(map(str, tried))), file=sys.stderr)
    raise SystemExit(2)
