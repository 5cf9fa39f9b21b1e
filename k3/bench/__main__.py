"""`k3-bench`: benchmarks over the public API. One subcommand per file beside this one."""

from __future__ import annotations

import argparse
import importlib
import sys

from rich.console import Console

from k3.bench import calibrate, prefix, roofline, serve, spec, step
from k3.bench import eval as evaluation
from k3.errors import ConfigError, K3Error

PIPELINE = "prefill_svc.pipeline_bench"  # of a service, which nothing in this package imports


def main() -> None:
    """Entry point of `k3-bench`."""
    p = argparse.ArgumentParser(prog="k3-bench", description=__doc__)
    commands = p.add_subparsers(dest="command", required=True)
    pipeline = importlib.import_module(PIPELINE)
    for module in (serve, step, evaluation, spec, calibrate, prefix, roofline, pipeline):
        name = module.__name__.rsplit(".", 1)[1].removesuffix("_bench")
        sub = commands.add_parser(name, help=(module.__doc__ or "").strip().split("\n")[0])
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    args = p.parse_args()
    try:
        sys.exit(args.run(args, Console()))
    except K3Error as error:
        sys.stderr.write(f"k3-bench: {error}\n")
        sys.exit(2 if isinstance(error, ConfigError) else 1)


if __name__ == "__main__":
    main()
