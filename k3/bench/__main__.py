"""`k3-bench`: benchmarks over the public API. One subcommand per file beside this one."""

from __future__ import annotations

import argparse
import importlib
import math
import sys
from pathlib import Path

from rich.console import Console

from k3.bench import calibrate, prefix, roofline, serve, spec, step
from k3.bench import eval as evaluation
from k3.errors import ConfigError, K3Error

PIPELINE = "prefill_svc.pipeline_bench"  # of a service, which nothing in this package imports


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Names values by their type and tells defaults that are not empty."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        is_told = action.default not in (None, "", False)
        return super()._get_help_string(action) if is_told else action.help

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        names: dict[object, str] = {int: "N", float: "X", Path: "FILE"}
        return names.get(action.type, "TEXT")


def parser() -> argparse.ArgumentParser:
    """Every subcommand with its flags."""
    p = argparse.ArgumentParser(prog="k3-bench", description=__doc__)
    commands = p.add_subparsers(dest="command", required=True)
    pipeline = importlib.import_module(PIPELINE)
    for module in (serve, step, evaluation, spec, calibrate, prefix, roofline, pipeline):
        name = module.__name__.rsplit(".", 1)[1].removesuffix("_bench")
        about = (module.__doc__ or "").partition("\n")[0]
        sub = commands.add_parser(name, help=about, description=about, formatter_class=Help)
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    return p


def check(given: str, value: object, *, is_result: bool) -> None:
    """Raise ConfigError for a value that could only fail, or never end, once everything has run."""
    if isinstance(value, Path) and not value.parent.is_dir():
        raise ConfigError(f"{given}: there is no folder {value.parent}")
    if isinstance(value, Path) and is_result and value.is_dir():
        raise ConfigError(f"{given} is a folder; name a file")
    if isinstance(value, float) and not 0 <= value < math.inf:
        raise ConfigError(f"{given}: expected a number from 0")


def main() -> None:
    """Entry point of `k3-bench`."""
    args = parser().parse_args()
    try:
        for name, value in vars(args).items():
            check(f"--{name.replace('_', '-')} {value}", value, is_result=name != "model")
        sys.exit(args.run(args, Console()))
    except K3Error as error:
        sys.stderr.write(f"k3-bench: {error}\n")
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        sys.stderr.write("k3-bench: stopped\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
