"""The native library computes what the references compute, in both dtypes it has, on odd shapes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from k3_kernels.api import BackendError, Backends, select
from k3_kernels.cpu import build, library
from k3_kernels.cpu.dense import NativeDense
from k3_kernels.cpu.ops import NativeMix
from k3_kernels.reference import attnres, norm
from torch import Tensor

from tests.compare import assert_close

pytestmark = pytest.mark.skipif(not library.is_built(), reason="no C++ compiler at install")
CPU = torch.device("cpu")
DTYPES = [(torch.float64, 1e-12), (torch.float32, 2e-5)]
OLDER = """
import sys
import pytest
from k3_kernels.cpu import library

library.variant = lambda: "x86-64-v3"
sys.exit(pytest.main(sys.argv[1:]))
"""


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("dtype, tolerance", DTYPES)
@pytest.mark.parametrize("shape", [(1, 4, 256), (3, 5, 77), (2, 1, 5), (0, 2, 8)])
def test_mixing_equals_the_reference(
    shape: tuple[int, int, int], dtype: torch.dtype, tolerance: float
) -> None:
    n, candidates, width = shape
    frame = draw(n, candidates + 2, width, dtype=dtype)
    frame[:, candidates:] = torch.nan  # blocks that are not banked yet
    weight = draw(width, dtype=dtype, seed=1)
    x = frame[:, :candidates]
    assert_close(NativeMix()(x, weight, 1e-5), attnres.mix(x, weight, 1e-5), tolerance, "mixture")


def test_native_is_refused_where_it_cannot_run() -> None:
    with pytest.raises(BackendError, match="runs on CPUs"):
        select(Backends(kda="native"), torch.device("meta"))


def test_a_library_without_a_function_of_this_source_is_refused_with_the_remedy() -> None:
    with pytest.raises(library.LibraryError, match=r"no k3_later_f32: .*build it"):
        library.function("k3_later_f32")


def test_a_library_that_is_missing_or_of_another_system_is_refused_with_the_remedy(
    tmp_path: Path,
) -> None:
    file = tmp_path / "libk3cpu.so"
    with pytest.raises(library.LibraryError, match=r"is missing; build it"):
        library.load(file)
    file.write_bytes(b"of another system")
    with pytest.raises(library.LibraryError, match=r"does not load: .*build it"):
        library.load(file)


@pytest.mark.skipif(shutil.which("c++") is None, reason="the compiler of the install is gone")
def test_a_library_of_other_sources_is_refused_with_the_remedy(tmp_path: Path) -> None:
    file = tmp_path / "libk3cpu.so"
    source = build.HERE / "src" / "abi.cpp"
    compile_ = [
        "c++",
        "-shared",
        "-fPIC",
        '-DK3_DIGEST="of yesterday"',
        str(source),
        "-o",
        str(file),
    ]
    subprocess.run(compile_, check=True, timeout=60)
    with pytest.raises(library.LibraryError, match=r"from other sources than are here; build it"):
        library.load(file)


@pytest.mark.skipif(library.variant() != "x86-64-v4", reason="the older library is tested as it is")
def test_the_library_of_older_cpus_passes_the_same_tests() -> None:
    """In a process of its own, which takes this CPU for one without AVX-512."""
    here = Path(__file__).parent
    files = [*sorted(here.glob("test_native*.py")), here / "test_draft_ops.py"]
    done = subprocess.run(
        [sys.executable, "-c", OLDER, "-qx", "-p", "no:cacheprovider", "-k", "native", *files],
        cwd=here.parents[2],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_a_projection_of_another_dtype_or_width_is_refused_as_by_torch() -> None:
    project = NativeDense().projection(draw(5, 8, dtype=torch.float32))
    for x in (draw(3, 8, dtype=torch.float64), draw(4, 6, dtype=torch.float32)):
        with pytest.raises(RuntimeError):
            project(x)


@pytest.mark.parametrize("dtype, tolerance", DTYPES)
@pytest.mark.parametrize("shape", [(1, 17, 5), (5, 33, 7), (3, 64, 96), (0, 4, 4), (70, 9, 8)])
@pytest.mark.parametrize("is_narrow", [False, True])
def test_a_projection_equals_the_product(
    shape: tuple[int, int, int], is_narrow: bool, dtype: torch.dtype, tolerance: float
) -> None:
    n, outputs, inputs = shape
    weight = draw(outputs, inputs, dtype=dtype)
    if is_narrow:  # what a checkpoint in bfloat16 holds
        weight = weight.bfloat16().to(dtype)
    x = draw(n, inputs + 3, dtype=dtype, seed=1)[:, :inputs]
    assert_close(NativeDense().projection(weight)(x), x @ weight.t(), tolerance, "product")


def test_a_row_of_a_projection_depends_on_nothing_but_itself() -> None:
    x = draw(11, 40, dtype=torch.float32)
    project = NativeDense().projection(draw(50, 40, dtype=torch.float32, seed=1))
    whole = project(x)
    for n in range(1, 8):
        assert torch.equal(project(x[2 : 2 + n]), whole[2 : 2 + n]), n


@pytest.mark.parametrize("dtype, tolerance", DTYPES)
def test_norms_and_activations_equal_the_reference(dtype: torch.dtype, tolerance: float) -> None:
    dense = NativeDense()
    x, weight = draw(3, 29, dtype=dtype)[:, 4:], draw(25, dtype=dtype, seed=1)
    assert_close(dense.rms_norm(x, weight, 1e-5), norm.rms_norm(x, weight, 1e-5), tolerance, "norm")
    rows, gate = draw(3, 2, 25, dtype=dtype), draw(3, 60, dtype=dtype, seed=2)[:, 5:55] * 9
    heads = gate.view(3, 2, 25)
    expected = norm.gated_rms_norm(rows, heads, weight, 1e-5)
    assert_close(dense.gated_rms_norm(rows, heads, weight, 1e-5), expected, tolerance, "gated norm")
    flat = rows.flatten(1)
    assert_close(dense.gate(flat, gate), flat * torch.sigmoid(gate), tolerance, "gate")
    both = torch.cat((torch.linspace(-90, 90, 301, dtype=dtype), draw(301, dtype=dtype) * 30))
    for linear_beta in (25.0, None):
        expected = norm.situ(both[None, :301], both[None, 301:], 4.0, linear_beta)
        got = dense.situ(both[None], 4.0, linear_beta)
        assert_close(got / 30, expected / 30, tolerance, "SiTU")


def test_infinities_and_what_is_no_number_pass_as_in_torch() -> None:
    x = torch.tensor([[torch.inf, -torch.inf, torch.nan, 200.0, -200.0, 0.0]])
    one = torch.ones_like(x)
    assert_close(NativeDense().gate(one, x), torch.sigmoid(x), 0.0, "sigmoid")
