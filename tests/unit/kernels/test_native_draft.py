"""A drafter by the native library's blocks equals one computed part by part."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from k3_kernels.api import DenseOps, ReferenceDense
from k3_kernels.cpu import library
from k3_kernels.cpu.draft_ops import NativeDraft
from k3_kernels.layers import DraftHead
from torch import Tensor

from k3.config.resolve import EMBEDDED_MODEL
from k3.model.draft_ring import Context
from k3.model.dspark import Drafter, open_drafter
from k3.model.spec import K3Spec
from k3.parallel.collectives import solo_groups
from k3.parallel.mesh import WHOLE
from tests.compare import assert_close
from tests.drafters import random_drafter

pytestmark = pytest.mark.skipif(not library.is_built(), reason="no C++ compiler at install")
DTYPES = [("float64", torch.float64, 1e-12), ("float32", torch.float32, 1e-4)]
BLOCK, N_CONTEXT, WIDTH = 5, 70, 32


def drafter(folder: Path, ops: DenseOps, dtype: str) -> Drafter:
    spec = K3Spec.from_folder(EMBEDDED_MODEL)
    random = torch.Generator().manual_seed(3)
    shape = (spec.vocab_size, spec.hidden_size)
    table = torch.randn(*shape, generator=random).to(getattr(torch, dtype))
    return open_drafter(
        folder,
        WHOLE,
        solo_groups().shard,
        draft_tokens=BLOCK - 1,
        embed=lambda ids: table[ids],
        head=lambda x: x @ table.T,
        dtype=dtype,
        device=torch.device("cpu"),
        ops=ops,
    )


def context(n_rows: int, dtype: torch.dtype) -> Context:
    random = torch.Generator().manual_seed(n_rows)
    rows = torch.randn(n_rows, N_CONTEXT, 2, WIDTH, generator=random, dtype=dtype)
    seen = torch.rand(n_rows, N_CONTEXT, generator=random) < 0.9
    seen[0] = False  # a request without context
    return Context(torch.where(seen[..., None, None], rows, 0), seen)


@pytest.mark.parametrize("name, dtype, tolerance", DTYPES)
def test_a_layer_and_the_drafts_equal_the_reference(
    tmp_path: Path, name: str, dtype: torch.dtype, tolerance: float
) -> None:
    spec = K3Spec.from_folder(EMBEDDED_MODEL)
    folder = random_drafter(tmp_path, spec, "mla", seed=5, block=BLOCK)
    ours, parts = drafter(folder, NativeDraft(), name), drafter(folder, ReferenceDense(), name)
    assert ours.layers[0].block is not None
    assert ours.sequential.best is not None
    assert parts.layers[0].block is None
    for n_rows in (1, 3, 13):  # thirteen blocks are more tokens than the library takes
        seen = context(n_rows, dtype)
        anchor, base = torch.arange(n_rows) * 7 + 20, torch.arange(n_rows) * 31 + 80
        expected = parts.hidden(seen, anchor, base)
        assert_close(ours.hidden(seen, anchor, base), expected, tolerance, f"{n_rows} blocks")
        drafts = parts.draft(expected[:, : BLOCK - 1], anchor)
        assert torch.equal(ours.draft(expected[:, : BLOCK - 1], anchor), drafts)


@pytest.mark.parametrize("name, dtype, tolerance", DTYPES)
def test_context_rows_equal_the_reference(
    tmp_path: Path, name: str, dtype: torch.dtype, tolerance: float
) -> None:
    spec = K3Spec.from_folder(EMBEDDED_MODEL)
    folder = random_drafter(tmp_path, spec, "mla", seed=6, block=BLOCK)
    ours, parts = drafter(folder, NativeDraft(), name), drafter(folder, ReferenceDense(), name)
    assert ours.context.block is not None
    assert parts.context.block is None
    random = torch.Generator().manual_seed(7)
    for n_tokens in (1, 8, 77):
        taps = torch.randn(n_tokens, len(ours.spec.taps), spec.hidden_size, generator=random)
        taps, positions = taps.to(dtype), torch.randperm(4000, generator=random)[:n_tokens]
        expected = parts.context(taps, positions)
        assert_close(ours.context(taps, positions), expected, tolerance, f"{n_tokens} tokens")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["equal", "nan", "infinite", "tail"])
def test_drafts_are_the_first_of_the_best_as_torch_has_it(dtype: torch.dtype, kind: str) -> None:
    n_rows, n, vocabulary = 2, 3, 53
    logits = torch.zeros(n_rows, n, vocabulary, dtype=dtype)
    match kind:
        case "equal":
            logits[..., [11, 30, 52]] = 4.0
        case "nan":
            logits[..., [17, 52]] = torch.nan
            logits[..., 3] = torch.inf
        case "infinite":
            logits[..., 40:45] = torch.inf
            logits[..., 7] = -torch.inf
        case _:
            logits[..., 52] = 1.0
    table = torch.zeros(vocabulary, 6, dtype=dtype)
    ops = NativeDraft()
    head = ops.draft_tokens(DraftHead(table, ops.projection(torch.zeros_like(table))))
    assert head is not None
    drafts: Tensor = head(logits, torch.tensor([0, vocabulary - 1]))
    assert torch.equal(drafts, logits.argmax(-1))
