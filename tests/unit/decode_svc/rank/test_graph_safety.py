"""A step reads nothing back, costs the host the same for any number of rows, and may be recorded and replayed."""

from __future__ import annotations

import gc
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from decode_svc.rank.cuda_graphs import CudaGraphs, Sizes
from decode_svc.rank.graphs import UNCHECKED, PassThrough, StepKey, doubled, generous
from k3.device import CpuDevice
from k3.model.dspark_spec import DraftSpec
from k3.model.k3 import Stage
from k3.model.registry import open_stage
from k3.model.spec import K3Spec
from k3.parallel.collectives import solo_groups
from k3.parallel.mesh import SOLO
from k3.sampling import Flavour
from k3.types import LogprobParams, SamplingParams
from tests.drafters import LocalEngine, random_drafter
from tests.model_runner import CPU
from tests.unit.decode_svc.rank.fixed_ops import fixed_ops

pytestmark = pytest.mark.dspark

KEY = StepKey(1, 64, Flavour(greedy=True), 1, proposes=True)
OTHER = KEY._replace(group=UNCHECKED)
NANO = Path(__file__).parents[3] / "golden" / "k3"
SPEC = K3Spec.from_folder(NANO)
DRAFTS = 3
KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "seeded": SamplingParams(temperature=0.8, top_p=0.9, min_p=0.001, seed=5),
    "edited": SamplingParams(
        temperature=0.9,
        top_k=50,
        seed=6,
        presence_penalty=0.5,
        repetition_penalty=1.2,
        logit_bias={4: 2.0},
        min_tokens=4,
    ),
}


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_drafter(tmp_path_factory.mktemp("drafter"), SPEC, "mla", 3, block=DRAFTS)


@pytest.fixture(scope="module")
def stage(drafter: Path) -> Stage:
    return open_stage(
        NANO,
        SOLO,
        solo_groups(),
        fixed_ops(),
        dtype="float64",
        device=CPU,
        taps=DraftSpec.from_folder(drafter).taps,
    )


def engine(stage: Stage, drafter: Path, n: int, **options: Any) -> LocalEngine:
    return LocalEngine(stage, n, 48, drafter=drafter, draft_tokens=DRAFTS, window=8, **options)


def opened(engine: LocalEngine, params: Sequence[SamplingParams], **how: Any) -> LocalEngine:
    """After one token of each request: everything is in place, nothing has been launched."""
    rng = random.Random(2)
    prompts = [
        [rng.randrange(SPEC.vocab_size) for _ in range(1 + i % 5)] for i in range(len(params))
    ]
    engine.generate(prompts, 1, params, end_ids=(7,), **how)
    return engine


def launch(engine: LocalEngine, n: int) -> None:
    engine.step.launch(range(1, n + 1), 40)


# ------------------------------------------------------------------ what the host does

READS = {"_local_scalar_dense", "item", "nonzero", "is_nonzero", "masked_select", "unique"}
READS_BY_HAND = {"tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__"}
VIEWS = {"view", "_unsafe_view", "expand"}  # no work; a batch of one has a few more


class Operations(TorchDispatchMode):
    """Counts operators; raises for one whose result's shape or value the host must see."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in VIEWS:
            self.names[name] += 1
        assert name not in READS, f"{func} reads the device"
        if name in ("index", "index_put", "index_put_"):
            chosen = [i for i in args[1] if i is not None]
            assert all(i.dtype == torch.int64 for i in chosen), f"{func} by a mask reads the device"
        for value in (*args, *(kwargs or {}).values()):
            assert not isinstance(value, torch.device) or value == CPU
        return func(*args, **(kwargs or {}))


@contextmanager
def calls() -> Iterator[Counter[str]]:
    """Python and C functions called; raises for methods of tensors that read values past the dispatcher."""
    seen: Counter[str] = Counter()

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            seen[frame.f_code.co_qualname] += 1
        elif event == "c_call":
            seen[argument.__qualname__] += 1
            reads = argument.__name__ in READS_BY_HAND and "Tensor" in argument.__qualname__
            # sorting on a CPU goes through numpy, a GPU has its own branch
            assert not reads or frame.f_code.co_name == "_descending", argument

    # a collection runs the callbacks of whoever registered some, whenever it happens to come
    gc.collect()
    gc.disable()
    sys.setprofile(watch)
    try:
        yield seen
    finally:
        sys.setprofile(None)
        gc.enable()


@pytest.mark.parametrize(
    ("kind", "acceptance"),
    [("greedy", "match"), ("seeded", "match"), ("edited", "match"), ("edited", "block")],
)
def test_a_step_reads_nothing_back_and_costs_the_same_for_any_number_of_rows(
    stage: Stage, drafter: Path, kind: str, acceptance: str
) -> None:
    operations: list[Counter[str]] = []
    functions: list[Counter[str]] = []
    for n in (1, 13):
        running = opened(
            engine(stage, drafter, n, acceptance=acceptance),
            [KINDS[kind]] * n,
            logprobs=LogprobParams(True, 3),
        )
        launch(running, n)
        with Operations() as counted:
            launch(running, n)
        with calls() as seen:
            launch(running, n)
        operations.append(counted.names)
        functions.append(seen)
    assert operations[0] == operations[1]
    assert functions[0] == functions[1]
    assert sum(operations[0].values()) > 100, "the counter saw nothing"
    assert functions[0]["VerifyStep._run"] == 1


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: range(x[0]),
    ],
)
def test_the_watch_for_reads_sees_every_kind_of_read(read: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(AssertionError, match="reads the device"), Operations():
        read(torch.tensor([1, 0, 2]))


def test_the_watch_for_reads_sees_those_that_go_past_the_dispatcher() -> None:
    with pytest.raises(AssertionError, match="tolist"), calls():
        torch.tensor([1, 2]).tolist()


# ------------------------------------------------------------------ recording

MIXED = [KINDS["greedy"], KINDS["edited"], KINDS["seeded"], KINDS["seeded"], KINDS["greedy"]]


@pytest.mark.parametrize(
    ("acceptance", "runner"),
    [
        ("match", PassThrough((1, 2, 4, 8), (1, 2, 4))),
        ("token", CudaGraphs(CpuDevice(1), Sizes.up_to(5, 600, 1 + DRAFTS), most=2)),
    ],
    ids=["match", "token, few kept"],
)
def test_a_replayed_step_gives_the_tokens_of_an_eager_one(
    stage: Stage, drafter: Path, acceptance: str, runner: PassThrough | CudaGraphs
) -> None:
    """Requests end at different steps: compositions, buckets and flavours change under the recordings."""
    prompts = [[3, 1, 4], [1, 5], [9], [2, 6, 5, 3, 5], [8, 9, 7, 9]]
    answers: list[Any] = []
    for options in ({"buckets": (1, 2, 4, 8)}, {"runner": runner}):
        running = engine(stage, drafter, 5, acceptance=acceptance, **options)
        answers.append(
            running.generate(
                prompts, 14, MIXED, end_ids=tuple(range(0, 512, 9)), logprobs=LogprobParams(True, 2)
            )
        )
    eager, replayed = answers
    assert [a.ids for a in eager] == [a.ids for a in replayed]
    assert [a.accepted for a in eager] == [a.accepted for a in replayed]
    for a, b in zip(eager, replayed, strict=True):
        for x, y in zip(a.events, b.events, strict=True):
            assert x.logprob == pytest.approx(y.logprob, abs=1e-9)  # other lengths are added up
    assert runner.n_recorded > 2


def test_a_step_replayed_twice_from_the_same_state_drifts_nowhere(
    stage: Stage, drafter: Path
) -> None:
    running = opened(engine(stage, drafter, 5, runner=PassThrough(), acceptance="block"), MIXED)
    launch(running, 5)
    memory = [
        *running.step.buffers().values(),
        *running.pools.storage.pools.values(),
        *running.pools.caches.tails.values(),
        running.ring.pool if running.ring is not None else torch.empty(0),
    ]
    places = [tensor.data_ptr() for tensor in memory]
    before = [tensor.clone() for tensor in memory]
    results: list[list[torch.Tensor]] = []
    for _ in range(2):
        for tensor, start in zip(memory, before, strict=True):
            tensor.copy_(start)
        launch(running, 5)
        results.append([tensor.clone() for tensor in memory])
    for first, second in zip(*results, strict=True):
        assert torch.equal(first.nan_to_num(-1.0), second.nan_to_num(-1.0))
    assert places == [tensor.data_ptr() for tensor in memory]
    moved = [
        not torch.equal(a.nan_to_num(-1.0), b.nan_to_num(-1.0))
        for a, b in zip(before, results[0], strict=True)
    ]
    assert any(moved), "the step did nothing"


def test_recording_touches_no_request(stage: Stage, drafter: Path) -> None:
    """A recorder runs the work several times; it does so with dummy rows."""
    running = opened(engine(stage, drafter, 2, runner=PassThrough()), MIXED[:2])
    plain = opened(engine(stage, drafter, 2), MIXED[:2])
    for step in range(2):
        launch(running, 2)
        launch(plain, 2)
        for name in ("base_R", "anchor_R", "read_column_R", "drafts_RK"):
            found, wanted = getattr(running.table, name), getattr(plain.table, name)
            assert torch.equal(found[1:], wanted[1:]), (step, name)
        counted = running.table.edits.generated_RV[1:]
        assert torch.equal(counted, plain.table.edits.generated_RV[1:])


def test_a_buffer_that_is_replaced_instead_of_overwritten_is_found() -> None:
    kept = {"x": torch.zeros(3)}
    runner = PassThrough()

    def replace_it() -> None:
        kept["x"] = kept["x"] + 1

    with pytest.raises(AssertionError, match="buffers moved: x"):
        runner.capture(KEY, replace_it, lambda: kept)
    runner = PassThrough()
    runner.capture(KEY, lambda: None, lambda: kept)
    kept["x"] = torch.ones(3)
    with pytest.raises(AssertionError, match="earlier capture moved: x"):
        runner.capture(OTHER, lambda: None, lambda: kept)


def test_what_a_later_call_closes_over_does_not_reach_a_recording() -> None:
    seen: list[int] = []
    runner = PassThrough()
    runner.capture(KEY, lambda: seen.append(1), dict)
    runner.run(KEY, lambda: seen.append(2))
    assert seen == [1, 1, 1]


def test_sizes_end_with_the_largest_there_is() -> None:
    assert Sizes.up_to(5, 3000, 8) == Sizes((1, 2, 4, 5), (512, 2048, 3000), (1, 2, 4, 8))
    assert Sizes.up_to(1, 70, 1) == Sizes((1,), (70,), (1,))
    runner = CudaGraphs(CpuDevice(1), Sizes.up_to(5, 3000, 8), 1)
    assert [runner.bucket(n) for n in (1, 3, 5)] == [1, 4, 5]
    assert [runner.bound(n) for n in (1, 512, 513, 2999)] == [512, 512, 2048, 3000]
    assert [runner.width(n) for n in (1, 3, 8)] == [1, 4, 8]


def test_a_generous_flavour_has_every_part_of_the_flavour_it_serves() -> None:
    for name in (f.name for f in fields(Flavour)):
        one = Flavour(**{name: True})
        assert getattr(generous(one), name), name
        assert generous(generous(one)) == generous(one)


def test_length_bounds_are_few() -> None:
    assert sorted({doubled(n) for n in range(1, 3000)}) == [64, 128, 256, 512, 1024, 2048, 4096]
    assert all(doubled(n) >= n for n in range(1, 3000))
