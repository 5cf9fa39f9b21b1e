"""Chunks on a rank: however a prompt is cut and whatever shares its steps, token and caches are the same.

Model: k3-nano of golden/k3, whose `decode_ids[0]` is the first greedy token.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from k3_kernels.api import Backends, select
from safetensors.torch import load_file
from torch import Tensor

from k3.cache.layout import build_layout
from k3.cache.storage import Storage
from k3.model.dspark import open_context
from k3.model.dspark_spec import DraftSpec
from k3.model.k3 import Stage
from k3.model.registry import build_stage
from k3.model.spec import K3Spec
from k3.model.weights import open_folder
from k3.parallel.mesh import WHOLE, Mesh
from k3.sampling import RowSampling
from k3.types import LogprobParams, SamplingParams
from prefill_svc.core.stage import ChunkOutput, ChunkStage, FirstToken, StageChunk
from tests.compare import assert_close
from tests.drafters import random_drafter

pytestmark = pytest.mark.prefill

GOLDEN = Path(__file__).parents[3] / "golden" / "k3"
P = 8
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def stage() -> Stage:
    ops = select(Backends(), torch.device("cpu"))
    return build_stage(K3Spec.from_folder(GOLDEN), open_folder(GOLDEN), ops, dtype="float64")


@pytest.fixture(scope="module")
def cases() -> dict[str, Tensor]:
    return load_file(GOLDEN / "cases.safetensors")


def chunk_stage(stage: Stage, n_pages: int = 40) -> ChunkStage:
    layout = build_layout(stage.spec, Mesh(), 0, page_tokens=P, dtype="float64")
    storage = Storage(layout, n_pages, 4, torch.device("cpu"), fill_nan=True)
    return ChunkStage(stage, storage, P)


def cut(
    ids: list[int],
    lengths: list[int],
    pages: tuple[int, ...],
    slot: int,
    *,
    params: SamplingParams = GREEDY,
    end_ids: tuple[int, ...] = (),
    output_prefix_len: int = 0,
    prompt_logprobs: LogprobParams | None = None,
    logprobs: LogprobParams | None = None,
) -> list[StageChunk]:
    """The chunks of one prompt; the last of `lengths` repeats until the prompt is covered."""
    chunks, start = [], 0
    while start < len(ids):
        length = min(lengths[min(len(chunks), len(lengths) - 1)], len(ids) - start)
        end = start + length
        first = None
        output_start = len(ids) - output_prefix_len
        if end == len(ids):
            sampling = RowSampling(
                params=params,
                end_ids=end_ids,
                logprobs=logprobs or LogprobParams(),
                output_start=output_start,
            )
            first = FirstToken(sampling, tuple(ids[:output_start]), tuple(ids[output_start:]))
        chunks.append(
            StageChunk(
                start=start,
                token_ids=tuple(ids[start:end]),
                pages=pages[: -(-end // P)],
                read_slot=slot if start else -1,
                write_slot=slot,
                first=first,
                prompt_logprobs=prompt_logprobs,
                next_token_id=ids[end] if end < len(ids) else None,
            )
        )
        start = end
    return chunks


def run(stage: ChunkStage, chunks: list[StageChunk]) -> list[ChunkOutput]:
    return [
        stage.run(step, [chunk], lambda: None).outputs[0] for step, chunk in enumerate(chunks, 1)
    ]


def token_id(outputs: list[ChunkOutput]) -> int:
    token = outputs[-1].token
    assert token is not None
    return token.id


@pytest.mark.parametrize("lengths", [[1], [5], [P - 1], [P], [P + 1], [16, 3], [1000]])
def test_the_first_token_does_not_depend_on_how_the_prompt_is_cut(
    stage: Stage, cases: dict[str, Tensor], lengths: list[int]
) -> None:
    ids = cases["case0.input_ids"].tolist()
    outputs = run(chunk_stage(stage), cut(ids, lengths, (7, 3, 12, 4, 9), slot=2))
    assert token_id(outputs) == cases["case0.decode_ids"][0].item()
    assert all(output.token is None for output in outputs[:-1])


def test_prompts_in_one_step_do_not_see_each_other(stage: Stage, cases: dict[str, Tensor]) -> None:
    runner = chunk_stage(stage)
    first = cut(cases["case0.input_ids"].tolist(), [20], (1, 2, 3, 4, 5), slot=0)
    second = cut(cases["case1.input_ids"].tolist(), [20], (6,), slot=1)
    third = cut(cases["case2.input_ids"].tolist(), [77], tuple(range(10, 27)), slot=3)
    one = runner.run(1, [first[0], third[0]], lambda: None).outputs
    two = runner.run(2, [second[0], third[1], first[1]], lambda: None).outputs
    assert [output.token for output in one] == [None, None]
    got = [output.token.id for output in two if output.token is not None]
    assert got == [cases[f"case{i}.decode_ids"][0].item() for i in (1, 2, 0)]


def test_rows_beyond_the_prompt_are_zero_in_the_last_page(
    stage: Stage, cases: dict[str, Tensor]
) -> None:
    runner = chunk_stage(stage)
    ids = cases["case0.input_ids"].tolist()
    rest = len(ids) % P
    assert rest
    run(runner, cut(ids, [16], (7, 3, 12, 4, 9), slot=2))
    latent = runner.storage.pools["latent"]
    assert not latent[[7, 3, 12, 4]].isnan().any()
    assert not latent[9, :, :rest].isnan().any()
    assert (latent[9, :, rest:] == 0).all()
    assert latent[5].isnan().all(), "a page nobody owns is not touched"


def test_caches_agree_with_the_published_states(stage: Stage, cases: dict[str, Tensor]) -> None:
    runner = chunk_stage(stage)
    ids = cases["case0.input_ids"].tolist()
    run(runner, cut(ids, [11], (7, 3, 12, 4, 9), slot=2))
    caches = runner.storage.caches()
    for layer, states in caches.states.items():
        expected = cases[f"case0.layer{layer}.kda_state"].double()
        torch.testing.assert_close(states[2], expected, atol=1e-3, rtol=0)
    for layer, latents in caches.latents.items():
        rows = torch.cat([latents[page] for page in (7, 3, 12, 4, 9)])[: len(ids)]
        expected = cases[f"case0.layer{layer}.mla_latent"].double()
        torch.testing.assert_close(rows, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("lengths", [[1000], [10], [1]])
def test_prompt_logprobs_cover_every_token_but_the_first(
    stage: Stage, cases: dict[str, Tensor], lengths: list[int]
) -> None:
    ids = cases["case0.input_ids"].tolist()
    wanted = LogprobParams(enabled=True, top=3)
    outputs = run(
        chunk_stage(stage),
        cut(ids, lengths, (7, 3, 12, 4, 9), slot=2, prompt_logprobs=wanted, logprobs=wanted),
    )
    tokens = [token for output in outputs for token in output.prompt_tokens]
    assert [token.id for token in tokens] == ids[1:]
    expected = cases["case0.logits"].double().log_softmax(-1)
    got = torch.tensor([token.logprob for token in tokens], dtype=torch.float64)
    want = torch.stack([expected[i, ids[i + 1]] for i in range(len(ids) - 1)])
    torch.testing.assert_close(got, want, atol=2e-4, rtol=0)
    first = outputs[-1].token
    assert first is not None
    assert first.logprob == pytest.approx(expected[-1].max().item(), abs=2e-4)
    assert len(first.top) == 3


@pytest.mark.parametrize(("output_prefix_len", "is_penalised"), [(0, False), (1, True)])
def test_penalties_count_tokens_that_a_migrated_request_brings_along(
    stage: Stage, cases: dict[str, Tensor], output_prefix_len: int, is_penalised: bool
) -> None:
    """A bias lets the prompt's last token win by 1; as generated output it loses 2."""
    ids, logits = cases["case0.input_ids"].tolist(), cases["case0.logits"][-1]
    best, last = int(logits.argmax()), ids[-1]
    lead = float(logits[best] - logits[last]) + 1.0
    params = SamplingParams(temperature=0.0, presence_penalty=2.0, logit_bias={last: lead})
    chunks = cut(ids, [16], (1, 2, 3, 4, 5), 0, params=params, output_prefix_len=output_prefix_len)
    assert token_id(run(chunk_stage(stage), chunks)) == (best if is_penalised else last)


@pytest.mark.parametrize(("output_prefix_len", "is_banned"), [(0, True), (1, False)])
def test_min_tokens_counts_tokens_that_a_migrated_request_brings_along(
    stage: Stage, cases: dict[str, Tensor], output_prefix_len: int, is_banned: bool
) -> None:
    ids = cases["case0.input_ids"].tolist()
    best = cases["case0.decode_ids"][0].item()
    params = SamplingParams(temperature=0.0, min_tokens=1)
    chunks = cut(
        ids,
        [16],
        (1, 2, 3, 4, 5),
        0,
        params=params,
        end_ids=(best,),
        output_prefix_len=output_prefix_len,
    )
    assert (token_id(run(chunk_stage(stage), chunks)) != best) == is_banned


@pytest.mark.dspark
@pytest.mark.parametrize("flavour", ["mla", "gqa"])
def test_draft_rows_do_not_depend_on_how_the_prompt_is_cut(
    flavour: str, cases: dict[str, Tensor], tmp_path: Path
) -> None:
    """Every chunk writes its rows at absolute positions, the middle ones too; beyond the prompt there are zeros."""
    folder = random_drafter(tmp_path / flavour, K3Spec.from_folder(GOLDEN), flavour, seed=4)
    spec = DraftSpec.from_folder(folder)
    ops, cpu = select(Backends(), torch.device("cpu")), torch.device("cpu")
    stage = build_stage(
        K3Spec.from_folder(GOLDEN), open_folder(GOLDEN), ops, dtype="float64", taps=spec.taps
    )
    layout = build_layout(stage.spec, Mesh(), 0, page_tokens=P, dtype="float64", draft=spec)
    context = open_context(folder, WHOLE, dtype="float64", device=cpu, ops=ops.dense)
    ids = [int(i) for i in cases["case0.input_ids"].flatten()]
    pages = tuple(range(9, 9 - -(-len(ids) // P), -1))
    found: list[Tensor] = []
    for lengths in ([len(ids)], [P, 5, 3], [1, 13]):
        storage = Storage(layout, 40, 4, cpu, fill_nan=True)
        run(ChunkStage(stage, storage, P, context), cut(ids, lengths, pages, 1))
        assert storage.draft is not None
        rows = storage.draft.movedim(-2, 1)[list(pages)].flatten(0, 1)
        assert not rows[len(ids) :].any()
        found.append(rows[: len(ids)])
    assert not found[0].isnan().any()
    for other in found[1:]:
        assert_close(other, found[0], 1e-9, "draft rows")
