"""The loaded native library: finds the variant for this CPU, checks that it fits, calls its functions.

Calls go through ctypes, which releases the interpreter lock. Torch-free: pointers and sizes are plain integers.
Every function of numbers exists for float32 (`NAME_f32`) and float64 (`NAME_f64`); `SIGNATURES` lists the arguments:
`p` a pointer, `i` a 64-bit integer, `d` a double.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from functools import cache
from pathlib import Path

from k3_kernels.cpu import build

REMEDY = "build it: python kernels/k3_kernels/cpu/build.py (needs a C++17 compiler), or reinstall"

SIGNATURES = {
    "k3_derive": "pppppppipiiiiipppppppii",
    "k3_draft_block": "pppipppiip",
    "k3_draft_context": "ppipip",
    "k3_draft_rows": "ppipppppiii",
    "k3_draft_tokens": "pppippiiii",
    "k3_draw": "pippppiii",
    "k3_experts": "pippiipipiiiiiddp",
    "k3_attend_chunk": "pippppiiiiiid",
    "k3_gate": "ppipii",
    "k3_gated_rms_norm": "ppippiiid",
    "k3_judge": "ppipppppppiii",
    "k3_kda_block": "ppipppiip",
    "k3_linear": "pipipiii",
    "k3_kda_group": "pipipipppddppppiiiii",
    "k3_kda_chunk": "pipipipppdidpppppiiiiii",
    "k3_mix": "piippiiid",
    "k3_mla_block": "ppipiippipiiip",
    "k3_mla_decode": "piipiipipppiiiiiid",
    "k3_mla_write": "piipipiii",
    "k3_moe_block": "ppiip",
    "k3_rms_norm": "pippiid",
    "k3_route": "pippppiiiiiiiid",
    "k3_shared_enter": "pi",
    "k3_shared_exchange": "piiiipiiiipddp",
    "k3_shared_sum": "piiiipiddp",
    "k3_situ": "pipiidd",
}
_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "d": ctypes.c_double}
_V3 = {"abm", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}  # as /proc/cpuinfo spells them
_NEEDS = {
    "x86-64-v4": _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": _V3,
}


class LibraryError(RuntimeError):
    """The native library is not there, or not this source's. The message has the remedy."""


@cache
def variant() -> str | None:
    """The best variant this CPU can run; None when there is none."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return "portable"
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return None
    flags = {
        word
        for line in cpuinfo.read_text().splitlines()
        if line.startswith("flags")
        for word in line.split()
    }
    return next((name for name, needs in _NEEDS.items() if needs <= flags), None)


def is_built() -> bool:
    """Whether `Library` can be expected to load."""
    name = variant()
    return name is not None and build.path(name).exists()


@cache
def function(name: str) -> Callable[..., None]:
    """One exported function, `k3_rms_norm_f32` or `k3_shared_enter` for instance, typed. Raises LibraryError."""
    try:
        call = getattr(_open(), name)
    except AttributeError as error:
        raise LibraryError(
            f"the native library has no {name}: it is older than its source; {REMEDY}"
        ) from error
    call.restype = None
    letters = SIGNATURES.get(name) or SIGNATURES[name.rpartition("_")[0]]
    call.argtypes = [_TYPES[letter] for letter in letters]
    return call


@cache
def _open() -> ctypes.CDLL:
    name = variant()
    if name is None:
        raise LibraryError("this CPU has no AVX2: the native library does not run here")
    return load(build.path(name))


def load(file: Path) -> ctypes.CDLL:
    """A library whose functions have this source's signatures. Raises LibraryError."""
    if not file.exists():
        raise LibraryError(f"{file} is missing; {REMEDY}")
    try:
        library = ctypes.CDLL(str(file))
    except OSError as error:  # built for another system
        raise LibraryError(f"{file} does not load: {error}; {REMEDY}") from error
    try:
        library.k3_digest.restype = ctypes.c_char_p
        found = library.k3_digest().decode()
    except AttributeError as error:
        raise LibraryError(f"{file} has no k3_digest; {REMEDY}") from error
    if found != build.digest():
        raise LibraryError(f"{file} was built from other sources than are here; {REMEDY}")
    return library
