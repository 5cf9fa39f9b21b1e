"""`k3-local`: router, prefill and decode on this machine, in the foreground, on the embedded model.

Flags that are not our own go to the services: `--prefill-X` to prefill as `--X`, `--decode-X` to decode, `--router-X`
to the router; a bare `--X` goes to every service whose configuration has that section, and a bare layout flag (--cp,
--pages, --max-rows, ...) to decode. Exit codes: 0 asked to stop, 2 configuration, 3 model, 4 port in use, 1 other.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from importlib.metadata import version
from types import FrameType

from k3.ask import ask
from k3.bench.suites import read
from k3.cluster import LocalCluster, MemberFailed, Options
from k3.errors import ConfigError, K3Error, RequestAborted
from k3.ports import free_ports, is_free

QUESTION = (
    "Carlos buys 5 cartons with 17 kites in each. He gives 6 kites to each of 3 boys. "
    "How many kites does Carlos have left?"
)
RECALL = (
    "passkey_4k"  # the suite whose first item the demo asks: a fact in 4,000 tokens of other text
)
SHOWN_CHARS = 300
ROUTER = ("http-", "fleet-", "admission-")
EVERYWHERE = ("model", "model-", "telemetry-", "log-")
ENGINES = (
    *("page-tokens", "cache-page-tokens", "cache-fill-nan", "drafter", "spec-drafter"),
    *("transfer-", "backends-", "serve-"),
)
CLEAR = "\r\033[K"  # of the terminal's line
PREFIXED = ("prefill", "decode", "router")


class Stop:
    """Counts SIGINT and SIGTERM; the second one asks for a hurried end."""

    def __init__(self) -> None:
        self.count = 0
        self._wake = threading.Event()
        for sig in (signal.SIGINT, signal.SIGTERM):
            signal.signal(sig, self._on_signal)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # `nohup k3-local` goes on
            signal.signal(signal.SIGHUP, self._on_signal)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self.count += 1
        self._wake.set()

    def is_asked(self) -> bool:
        """Whether a signal has come."""
        return self.count > 0

    def wait(self, seconds: float) -> bool:
        """Wait for the first signal at most so long."""
        return self._wake.wait(seconds)


def split_flags(argv: Sequence[str]) -> dict[str, list[str]]:
    """Flags of each service, by the rule of the module docstring. ConfigError for a word that is no flag."""
    out: dict[str, list[str]] = {role: [] for role in PREFIXED}
    words = list(argv)
    while words:
        flag = words.pop(0)
        if not flag.startswith("--"):
            raise ConfigError(f"unexpected argument {flag!r}: a value must follow its --flag")
        piece = [flag]
        if "=" not in flag and words and not words[0].startswith("--"):
            piece.append(words.pop(0))
        roles, name = _destination(flag[2:].split("=")[0])
        piece[0] = f"--{name}" + flag[2 + len(flag[2:].split("=")[0]) :]
        for role in roles:
            out[role] += piece
    return out


def _destination(name: str) -> tuple[tuple[str, ...], str]:
    """Services a flag goes to, and its name there."""

    def matches(patterns: tuple[str, ...]) -> bool:
        return any(name.startswith(p) if p.endswith("-") else name == p for p in patterns)

    for role in PREFIXED:
        if name.startswith(f"{role}-"):
            return (role,), name.removeprefix(f"{role}-")
    if matches(EVERYWHERE):
        return PREFIXED, name
    if matches(ROUTER):
        return ("router",), name
    if matches(ENGINES):
        return ("prefill", "decode"), name
    return ("decode",), name


def parser() -> argparse.ArgumentParser:
    """Our own flags."""
    p = argparse.ArgumentParser(
        prog="k3-local",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    p.add_argument("--host", default="127.0.0.1", help="address of the API")
    p.add_argument("--port", type=int, default=8000, help="port of the API; 0 = any free one")
    p.add_argument("--prefills", type=int, default=1, help="prefill instances")
    p.add_argument("--decodes", type=int, default=1, help="decode instances")
    p.add_argument("--preset", default="tiny-demo", help="of every service; '' = none")
    p.add_argument("--ask", metavar="TEXT", help="start, ask one question, print the answer, stop")
    p.add_argument("--demo", action="store_true", help="--ask two built-in questions, any port")
    p.add_argument("--check", action="store_true", help="print configurations and refusals; 0 or 2")
    p.add_argument(
        "--logs", action="store_true", help="show the services' logs (default unless --ask)"
    )
    p.add_argument("--start-timeout-s", type=float, default=120.0, help="deadline to be ready")
    p.add_argument("--version", action="version", version=f"k3-local {version('k3-serving')}")
    return p


def say(text: str, end: str = "\n") -> None:
    """To the person at the terminal; one that is gone (`k3-local | head`) has asked us to stop."""
    try:
        sys.stdout.write(text + end)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        os.kill(os.getpid(), signal.SIGTERM)


class Progress:
    """Start-up as lines, one a stage; on a terminal the last line follows the figures."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._stages: dict[str, str] = {}

    def show(self, name: str, detail: str) -> None:
        """`detail` is a stage's name, with `done/total` behind it while it runs."""
        detail = detail.removeprefix("starting: ")
        stage, _, figures = detail.partition(" ")
        done, _, total = figures.partition("/")
        is_new = self._stages.get(name) != stage
        self._stages[name] = stage
        if self._is_terminal and done.isdigit() and total.isdigit() and total != "0":
            say(f"{CLEAR}  {name}: {stage} {100 * int(done) // int(total)} %", end="")
        elif is_new:
            say(f"{CLEAR if self._is_terminal else ''}  {name}: {detail}")


def check(cluster: LocalCluster) -> int:
    """Run `--check` of every service; the worst exit code."""
    worst = 0
    for member in cluster.members:
        say(f"# {member.name}: {member.module} {' '.join(member.flags)}")
        worst = max(worst, subprocess.run([*member.command(), "--check"], check=False).returncode)
    return worst


def curl_line(url: str) -> str:
    """A line to paste."""
    body = json.dumps({"messages": [{"role": "user", "content": QUESTION}], "temperature": 0})
    return f"curl -s {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"


def answer(cluster: LocalCluster, question: str, stop: Stop) -> None:
    """Ask, show the answer as it comes and its figures. RequestAborted at a signal."""
    say(f"\n> {shortened(question)}\n")
    in_reasoning = False

    def show(piece: str, is_reasoning: bool) -> None:
        nonlocal in_reasoning
        if stop.is_asked():
            raise RequestAborted("stopped while the answer was coming")
        if in_reasoning and not is_reasoning:
            say("\n---")
        in_reasoning = is_reasoning
        say(piece, end="")

    a = ask(cluster.url, question, show)
    say(
        f"\n\nTTFT {a.ttft_s * 1e3:.0f} ms | ITL {a.itl_s * 1e3:.1f} ms | {a.tokens_per_s:.1f} tokens/s"
        f" | {a.prompt_tokens} tokens in, {a.completion_tokens} out | finish {a.finish_reason}"
    )


def shortened(question: str) -> str:
    """A question to print: of a long one its first and its last line."""
    lines = question.splitlines()
    if len(question) <= SHOWN_CHARS or len(lines) < 3:
        return question
    return f"{lines[0]}\n  [{len(lines) - 2} more lines, {len(question)} characters in all]\n  {lines[-1]}"


def demo_questions() -> tuple[str, ...]:
    """A word problem and a fact to recall."""
    return QUESTION, read(RECALL, 1)[0].turns[0]["content"]


def run(cluster: LocalCluster, questions: Sequence[str], deadline_s: float, stop: Stop) -> int:
    """Start, then answer the questions, or without any serve until a signal; the exit code."""
    say(f"starting {', '.join(m.name for m in cluster.members)}")
    cluster.start(
        deadline_s,
        on_progress=Progress().show,
        should_stop=stop.is_asked,
    )
    try:
        if stop.is_asked():
            return 0
        for question in questions:
            answer(cluster, question, stop)
        if questions:
            return 0
        say(f"\nready: {cluster.url}/v1   (Ctrl-C stops)\n\n  {curl_line(cluster.url)}\n")
        while not stop.wait(0.5):
            cluster.check_alive()
        return 0
    finally:
        say("stopping")
        cluster.stop(should_hurry=lambda: stop.count > 1)


def main() -> None:
    """Entry point of `k3-local`."""
    args, rest = parser().parse_known_args()
    port = 0 if args.demo else args.port
    if port and not args.check and not is_free(port, args.host):
        sys.stderr.write(
            f"k3-local: port {port} of {args.host} is in use; "
            f"--port {free_ports(1, args.host)[0]} is free, --port 0 takes any\n"
        )
        sys.exit(4)
    questions = demo_questions() if args.demo else (args.ask,) if args.ask else ()
    shows_logs = args.logs or not questions
    try:
        flags = split_flags(rest)
        cluster = LocalCluster(
            Options(
                host=args.host,
                port=port,
                n_prefills=args.prefills,
                n_decodes=args.decodes,
                preset=args.preset,
                router_flags=tuple(flags["router"]),
                prefill_flags=tuple(flags["prefill"]),
                decode_flags=tuple(flags["decode"]),
            ),
            on_line=(lambda name, line: say(f"[{name}] {line}")) if shows_logs else None,
        )
        code = (
            check(cluster) if args.check else run(cluster, questions, args.start_timeout_s, Stop())
        )
    except MemberFailed as error:
        sys.stderr.write(f"k3-local: {error}\n")
        code = error.exit_code if error.exit_code in (2, 3, 4) else 1
    except ConfigError as error:
        sys.stderr.write(f"k3-local: {error}\n")
        code = 2
    except (K3Error, OSError) as error:
        sys.stderr.write(f"k3-local: {error}\n")
        code = 1
    sys.stdout.flush()
    sys.exit(code)


if __name__ == "__main__":
    main()
