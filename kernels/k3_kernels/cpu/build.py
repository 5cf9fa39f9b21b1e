"""Builds the native CPU library: one shared object per instruction set, into `lib/` beside this file.

Run by the build hook at install, and by hand after a change: `python kernels/k3_kernels/cpu/build.py`. Needs a C++17
compiler, `$CXX` or `c++`. Knows neither torch nor the package around it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).resolve().parent
LIB = HERE / "lib"
FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math"),
    *("-Wall", "-Wno-psabi", "-Wno-unknown-pragmas"),
)
VARIANTS = {
    "x86-64-v3": ("-march=x86-64-v3",),
    "x86-64-v4": ("-march=x86-64-v4", "-mprefer-vector-width=512"),
}
PORTABLE = {"portable": ()}


class BuildError(RuntimeError):
    """No compiler, or one that refuses a source. The message says what to do."""


def variants() -> dict[str, tuple[str, ...]]:
    """Flags of every library for this machine's architecture, by name."""
    return VARIANTS if platform.machine() in ("x86_64", "AMD64") else PORTABLE


def path(variant: str) -> Path:
    """Where the library of a variant lies."""
    return LIB / f"libk3cpu.{variant}.so"


def digest() -> str:
    """Of all sources and flags: a library of other ones is never loaded."""
    seen = hashlib.sha256(repr((FLAGS, VARIANTS)).encode())
    for source in sorted((HERE / "src").iterdir()):
        seen.update(source.name.encode() + b"\0" + source.read_bytes())
    return seen.hexdigest()


def remove() -> None:
    """Remove what was built, so that nobody loads a library of other sources. Running processes keep theirs."""
    for file in LIB.glob("*.so"):
        file.unlink(missing_ok=True)


def build() -> list[Path]:
    """Compile all variants, then put them in place. Raises BuildError and leaves what was there."""
    compiler = shlex.split(os.environ.get("CXX") or "c++")
    if shutil.which(compiler[0]) is None:
        raise BuildError(f"no C++ compiler {compiler[0]!r}: install g++ or clang++, or set CXX")
    sources = sorted((HERE / "src").glob("*.cpp"))
    identity = f'-DK3_DIGEST="{digest()}"'
    LIB.mkdir(exist_ok=True)
    with TemporaryDirectory(dir=LIB) as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = {
            name: [Path(folder) / f"{source.stem}.{name}.o" for source in sources]
            for name in variants()
        }
        compiled = [
            pool.submit(_run, *compiler, *FLAGS, identity, *flags, "-c", source, "-o", target)
            for name, flags in variants().items()
            for source, target in zip(sources, objects[name], strict=True)
        ]
        for job in compiled:
            job.result()
        for name, files in objects.items():
            linked = Path(folder) / path(name).name
            _run(*compiler, "-shared", *files, "-o", linked, "-lm")
            linked.replace(path(name))  # at once: a running process keeps the file it mapped
    return [path(name) for name in variants()]


def _run(*words: str | Path) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{shlex.join(map(str, words))} failed:\n{done.stderr}")


if __name__ == "__main__":
    try:
        for file in build():
            sys.stdout.write(f"{file}\n")
    except BuildError as error:
        raise SystemExit(str(error)) from error
