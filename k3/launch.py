"""`k3-local`: router, prefill and decode on this machine, in the foreground, on the embedded model.

Flags that are not our own go to the services: `--prefill-X` to prefill as `--X`, `--decode-X` to decode, `--router-X`
to the router; a bare `--X` goes to every service whose configuration has that section, and a bare layout flag (--cp,
--pages, --max-rows, ...) to decode; `--cache-prefix on` is prefill's. With `--role both` decode computes every prompt
itself, there is no prefill, and what would be prefill's is decode's. The embedded model drafts with its own drafter;
`--draft-tokens 0` turns that off. What a service takes: `k3-decode --help`, `k3-prefill --help`, `k3-router --help`.
Exit codes: 0 asked to stop, 2 configuration, 3 model, 4 port in use, 1 other.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from types import FrameType

from k3.ask import Answer
from k3.cluster import LocalCluster, MemberFailed, OnLine, Options
from k3.demo import comparison, curl_line, demo_questions, show_answer
from k3.errors import ConfigError, K3Error, RequestAborted
from k3.ports import free_ports, is_free

ROUTER = ("http-", "fleet-", "admission-")
PREFILL = ("cache-prefix", "cache-checkpoints", "cache-checkpoint-")
EVERYWHERE = ("model", "model-", "telemetry-", "log-")
ENGINES = (
    *("page-tokens", "cache-page-tokens", "cache-fill-nan", "drafter", "spec-drafter"),
    *("transfer-", "backends-", "serve-"),
)
# Where the services listen is ours to choose: we ask there whether they are ready.
ENGINE_ADDRESS = ("port", "serve-port", "ops-port", "serve-ops-port")
ROUTER_ADDRESS = ("host", "http-host", "port", "http-port")
# Of the embedded model: drafts, unless something else is chosen.
DRAFTER, DRAFT_TOKENS = "draft-mla", 7
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


def split_flags(argv: Sequence[str], is_alone: bool = False) -> dict[str, list[str]]:
    """Flags of each service, by the rule of the module docstring. ConfigError for a word that is no flag.

    is_alone: no prefill is started. ConfigError for a flag that only it could take.
    """
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
        if is_alone and flag.startswith("--prefill-"):
            raise ConfigError(
                f"{flag} with --role both: no prefill is started; give the flag without its prefix"
            )
        if is_alone:
            roles = tuple(dict.fromkeys("decode" if r == "prefill" else r for r in roles))
        if name in (ROUTER_ADDRESS if roles == ("router",) else ENGINE_ADDRESS):
            raise ConfigError(
                f"{flag}: ports are chosen here; --host and --port are those of the API"
            )
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
    if matches(PREFILL):
        return ("prefill",), name
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
    port, count = number(0, 65535), number(0, 99)
    p.add_argument("--host", default="127.0.0.1", help="address of the API (127.0.0.1)")
    p.add_argument(
        "--port", metavar="N", type=port, default=8000, help="of the API; 0 = any (8000)"
    )
    p.add_argument("--prefills", metavar="N", type=count, help="prefill instances (1)")
    p.add_argument("--decodes", metavar="N", type=count, default=1, help="decode instances (1)")
    p.add_argument(
        "--role",
        choices=("decode", "both"),
        default="decode",
        help="both: decode instances compute their own prompts, none is started for prefill",
    )
    p.add_argument("--preset", default="tiny-demo", help="of every service; '' = none (tiny-demo)")
    p.add_argument("--ask", metavar="TEXT", help="start, ask one question, print the answer, stop")
    p.add_argument("--demo", action="store_true", help="--ask two built-in questions, any port")
    p.add_argument("--check", action="store_true", help="print configurations and refusals; 0 or 2")
    p.add_argument(
        "--logs", action="store_true", help="show the services' logs (default unless --ask)"
    )
    p.add_argument(
        "--start-timeout-s", metavar="S", type=seconds, default=120.0, help="to be ready (120)"
    )
    p.add_argument("--version", action="version", version=f"k3-local {version('k3-serving')}")
    return p


def number(least: int, most: int) -> Callable[[str], int]:
    """Type of a flag: a whole number of that range."""

    def number(text: str) -> int:
        if not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text} is not one of {least} to {most}")
        return int(text)

    return number


def seconds(text: str) -> float:
    """Type of a flag: a time that ends."""
    if not 0 < float(text) < threading.TIMEOUT_MAX:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of seconds")
    return float(text)


def say(line: str) -> None:
    """One line to the person at the terminal."""
    write(f"{line}\n")


def write(text: str) -> None:
    """To the person at the terminal; one that is gone (`k3-local | head`) has asked us to stop."""
    try:
        sys.stdout.write(text)
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
            write(f"{CLEAR}  {name}: {stage} {100 * int(done) // int(total)} %")
        elif is_new:
            say(f"{CLEAR if self._is_terminal else ''}  {name}: {detail}")


def check(cluster: LocalCluster) -> int:
    """Run `--check` of every service; the worst exit code."""
    worst = 0
    for member in cluster.members:
        say(f"# {member.name}: {member.module} {' '.join(member.flags)}")
        worst = max(worst, subprocess.run([*member.command(), "--check"], check=False).returncode)
    return worst


def run(
    cluster: LocalCluster, questions: Sequence[str], deadline_s: float, stop: Stop
) -> list[Answer]:
    """Start, then answer the questions, or without any serve until a signal."""
    say(f"starting {', '.join(m.name for m in cluster.members)}")
    cluster.start(
        deadline_s,
        on_progress=Progress().show,
        should_stop=stop.is_asked,
    )
    try:
        if stop.is_asked():
            return []
        if questions:
            return [show_answer(cluster.url, q, write, stop.is_asked) for q in questions]
        say(f"\nready: {cluster.url}/v1   (Ctrl-C stops)\n\n  {curl_line(cluster.url)}\n")
        while not stop.wait(0.5):
            cluster.check_alive()
        return []
    finally:
        say("stopping")
        cluster.stop(should_hurry=lambda: stop.count > 1)


def demo(options: Options, deadline_s: float, on_line: OnLine | None) -> None:
    """The built-in questions; then the first one of a cluster without drafts, and what drafts were worth."""
    stop, questions = Stop(), demo_questions()
    answers = run(LocalCluster(options, on_line=on_line), questions, deadline_s, stop)
    if stop.is_asked() or answers[0].tokens_per_step is None:
        return
    say("\nthe first question once more, without drafts")
    without = replace(options, decode_flags=(*options.decode_flags, "--draft-tokens", "0"))
    answers += run(LocalCluster(without, on_line=on_line), questions[:1], deadline_s, stop)
    if not stop.is_asked():
        say(f"\n{comparison(answers[0], answers[-1])}")


def options_of(args: argparse.Namespace, rest: Sequence[str]) -> Options:
    """What to start. ConfigError for words that are no flags."""
    is_alone = args.role == "both"
    n_prefills: int = args.prefills if args.prefills is not None else 0 if is_alone else 1
    if is_alone and n_prefills:
        raise ConfigError(
            f"--prefills {n_prefills} with --role both: no prefill is started; leave it out"
        )
    if not args.decodes or not (is_alone or n_prefills):
        raise ConfigError(
            f"--prefills {n_prefills} --decodes {args.decodes}: nobody could answer; at least one of "
            "each, or --role both for decode without prefill"
        )
    flags = split_flags(rest, is_alone)
    if args.preset and has_own_drafter(flags):
        flags["prefill"][:0] = ["--drafter", DRAFTER]
        flags["decode"][:0] = ["--drafter", DRAFTER, "--draft-tokens", str(DRAFT_TOKENS)]
    return Options(
        host=args.host,
        port=0 if args.demo else args.port,
        n_prefills=n_prefills,
        n_decodes=args.decodes,
        preset=args.preset,
        router_flags=tuple(flags["router"]),
        prefill_flags=tuple(flags["prefill"]),
        decode_flags=("--role", "both", *flags["decode"]) if is_alone else tuple(flags["decode"]),
    )


def has_own_drafter(flags: Mapping[str, Sequence[str]]) -> bool:
    """Whether the embedded model runs and nobody chose a drafter: then its own one drafts."""
    chosen = {word.split("=")[0] for role in ("prefill", "decode") for word in flags[role]}
    if chosen & {"--model", "--model-path", "--config", "--drafter", "--spec-drafter"}:
        return False
    return not any(name in os.environ for name in ("K3_MODEL__PATH", "K3_SPEC__DRAFTER"))


def main() -> None:
    """Entry point of `k3-local`."""
    args, rest = parser().parse_known_args()
    shows_logs = args.logs or not (args.ask is not None or args.demo)
    on_line: OnLine | None = (lambda name, line: say(f"[{name}] {line}")) if shows_logs else None
    code = 0
    try:
        options = options_of(args, rest)
        if options.port and not args.check and not is_free(options.port, options.host):
            sys.stderr.write(
                f"k3-local: port {args.port} of {args.host} is in use; "
                f"--port {free_ports(1, args.host)[0]} is free, --port 0 takes any\n"
            )
            sys.exit(4)
        if args.check:
            code = check(LocalCluster(options))
        elif args.demo:
            demo(options, args.start_timeout_s, on_line)
        else:
            questions = [] if args.ask is None else [args.ask]
            run(LocalCluster(options, on_line=on_line), questions, args.start_timeout_s, Stop())
    except RequestAborted:
        code = 0  # asked to stop while an answer came
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
