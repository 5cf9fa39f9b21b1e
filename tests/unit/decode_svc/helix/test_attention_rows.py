"""R4, R7, R13, R38, and the number of messages of a step: attention over shares that may be empty."""

import ast
from collections import Counter
from pathlib import Path

import pytest
import torch
from k3_kernels.api import BackendError, Backends, select
from k3_kernels.reference import lse, mla
from k3_kernels.reference.tables import verify_tables
from torch import Tensor

from decode_svc.deployment import Deployment
from k3.cache.layout import build_layout
from k3.cache.storage import Storage
from k3.config.commandline import CommandLine
from k3.config.load import load_engine
from k3.config.resolve import EMBEDDED_MODEL
from k3.config.tree import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
from k3.model.batch import VerifyBatch
from k3.model.registry import open_stage
from k3.model.spec import K3Spec
from k3.parallel.collectives import Collectives, Groups
from k3.parallel.mesh import Mesh
from tests.compare import assert_close
from tests.model_runner import CPU, OPS
from tests.thread_group import mesh_groups, run_group

pytestmark = pytest.mark.helix

ROOT = Path(__file__).parents[4]
NANO = ROOT / "tests/golden/k3"
P, C, K, WIDTH = 4, 2, 20, 16


def test_r4_an_attention_backend_without_bounds_is_refused() -> None:
    problems = load_engine(
        "decode", CommandLine({"parallel.cp": "2", "backends.attention": "flash"}), {}
    ).problems
    assert any("backends.attention" in problem.values for problem in problems)
    with pytest.raises(BackendError, match="'flash'"):
        select(Backends(attention="flash"), CPU)


@pytest.mark.parametrize("folder", [str(EMBEDDED_MODEL), "."])
def test_r12_r14_a_drafter_inside_the_target_is_refused_by_what_it_is(folder: str) -> None:
    """The target's own folder has a path and a checkpoint; it is no drafter for all that."""
    flags = {"parallel.cp": "2", "spec.draft_tokens": "3", "spec.drafter": folder}
    problems = load_engine("decode", CommandLine(flags), {}).problems
    assert [problem.code for problem in problems] == ["DRAFTER"]


def test_r7_a_token_without_keys_is_finite_whatever_the_memory_holds() -> None:
    """Base 3, four tokens, pages of 4 over 2 ranks: rank 1 has keys, its first token sees none of them."""
    base, group, heads = 3, 4, 2
    make = torch.Generator().manual_seed(1)
    new = torch.randn(base + group, K, generator=make, dtype=torch.float64)
    q = torch.randn(group, heads, K, generator=make, dtype=torch.float64)

    def attend(cp: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        pool = torch.full((2, P, K), float("nan"), dtype=torch.float64)
        table = torch.tensor([[1, 0]], dtype=torch.int32)
        for pos in range(base):
            if pos // P % cp == rank:
                pool[int(table[0, pos // (P * cp)]), pos % P] = new[pos]
        valid = torch.ones(1, group, dtype=torch.bool)
        _, slot, bound = verify_tables(torch.tensor([base]), table, valid, P, cp, rank)
        mla.write(pool, slot, new[base:])
        plan = mla.plan_decode(table, bound, group, int(bound.max()), P)
        return (*mla.decode(q, pool, plan, 0.3, WIDTH), bound)

    partials = [attend(C, rank) for rank in range(C)]
    o_one, lse_one, bound_one = partials[1]
    assert bound_one.tolist() == [0, 1, 2, 3]
    assert o_one[0].eq(0).all()
    assert lse_one[0].eq(float("-inf")).all()
    merged, _ = lse.merge(
        torch.stack([p[0] for p in partials]), torch.stack([p[1] for p in partials])
    )
    whole, _, _ = attend(1, 0)
    assert_close(merged, whole, 1e-12, "merged")
    poisoned = o_one.clone()
    poisoned[0] = float("nan")  # what a kernel may leave in a row without keys
    again, _ = lse.merge(
        torch.stack([partials[0][0], poisoned]), torch.stack([p[1] for p in partials])
    )
    assert torch.equal(again, merged)


@pytest.mark.parametrize(
    "package", ["decode_svc", "k3/config", "k3/model", "k3/parallel", "kernels"]
)
def test_r13_no_field_is_looked_up_with_a_default(package: str) -> None:
    """A renamed field must break loudly, not switch something off."""
    for file in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                guessed = node.func.id == "getattr" and len(node.args) == 3
                assert not guessed, f"{file.relative_to(ROOT)}:{node.lineno}"
                assert node.func.id != "hasattr", f"{file.relative_to(ROOT)}:{node.lineno}"


class Counted:
    """A group whose calls and sent bytes are counted."""

    def __init__(self, inner: Collectives, calls: Counter[str]) -> None:
        self.inner, self.calls = inner, calls
        self.rank, self.size = inner.rank, inner.size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.calls["all_reduce"] += 1
        return self.inner.all_reduce(tensor)

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        self.calls["all_gather"] += 1
        self.calls["gathered bytes"] += tensor.nbytes * (self.size - 1)
        return self.inner.all_gather(tensor, dim)

    def all_to_all(self, tensor: Tensor) -> Tensor:
        self.calls["all_to_all"] += 1
        self.calls["exchanged bytes"] += tensor.nbytes // self.size * (self.size - 1)
        return self.inner.all_to_all(tensor)


def _step_of_one_token(mesh: Mesh, exchange: str, batch_size: int = 1) -> list[Counter[str]]:
    """One step of rows with a single token each, all keys on context rank 0; what every rank called."""
    groups = mesh_groups(mesh)

    def body(rank: int) -> Counter[str]:
        calls: Counter[str] = Counter()
        g = groups[rank]
        counted = Groups(
            Counted(g.shard, calls),  # type: ignore[arg-type]
            Counted(g.context, calls),  # type: ignore[arg-type]
            g.pipeline,
        )
        place = mesh.place(rank)
        stage = open_stage(
            NANO, place, counted, OPS, dtype="float64", device=CPU, exchange=exchange
        )
        layout = build_layout(stage.spec, mesh, 0, page_tokens=P, dtype="float64")
        storage = Storage(layout, batch_size, batch_size, CPU)
        table = torch.arange(batch_size, dtype=torch.int32)[:, None]
        valid = torch.ones(batch_size, 1, dtype=torch.bool)
        base = torch.zeros(batch_size, dtype=torch.int64)
        _, slot, bound = verify_tables(base, table, valid, P, mesh.cp, place.cp_rank)
        assert bound.tolist() == [int(place.cp_rank == 0)] * batch_size
        batch = VerifyBatch(
            token_ids_T=torch.full((batch_size,), 5),
            page_table_BW=table,
            slot_T=slot,
            bound_T=bound,
            state_slots_B=torch.arange(batch_size),
            read_column_B=base,
            group=1,
            max_bound=int(bound.max()),
        )
        frame = stage.forward(None, storage.caches(), batch).frame
        assert torch.isfinite(stage.logits(stage.hidden(frame))).all()
        return calls

    return run_group(mesh.size, body)


@pytest.mark.parametrize("exchange", ["value", "latent", "gather"])
def test_r38_a_rank_without_keys_enters_every_collective(exchange: str) -> None:
    calls = _step_of_one_token(Mesh(cp=2), exchange)
    assert calls[0] == calls[1]


@pytest.mark.parametrize("mesh", [Mesh(cp=2), Mesh(tp=2, cp=2)], ids=str)
@pytest.mark.parametrize("exchange", ["value", "latent", "gather"])
def test_messages_of_a_step_are_counted_by_layer_and_their_number_ignores_the_batch(
    exchange: str, mesh: Mesh
) -> None:
    """Two per layer: what attention adds up, what the feed-forward adds up. Only `gather` needs no third in MLA."""
    config = EngineConfig(
        role="decode",
        model=ModelConfig(str(NANO), "nano", "float64", "cpu", 64),
        cache=CacheConfig(page_tokens=P, pages=12, state_slots=4),
        parallel=ParallelConfig(tp=mesh.tp, cp=mesh.cp, exchange=exchange),
    )
    deployment = Deployment.of(config, "digest")
    spec = deployment.spec
    one, many = (_step_of_one_token(mesh, exchange, size)[0] for size in (1, 5))
    n_mla, n_layers = sum(map(spec.is_mla, range(spec.num_layers))), spec.num_layers
    embedding, logits = 1, 1
    if exchange == "gather":
        messages = {
            "all_reduce": 2 * n_layers - n_mla + embedding,
            "all_gather": n_mla + logits,
        }
    else:
        messages = {
            "all_to_all": n_mla,
            "all_reduce": 2 * n_layers + embedding,
            "all_gather": logits,
        }
    sent = "gathered bytes" if exchange == "gather" else "exchanged bytes"
    for calls, tokens in ((one, 1), (many, 5)):
        assert {name: calls[name] for name in messages} == messages
        assert calls["all_to_all"] == messages.get("all_to_all", 0)
        head = tokens * spec.vocab_size * 8 // mesh.size * (mesh.size - 1)
        gathered = head if sent == "gathered bytes" else 0
        assert calls[sent] - gathered == tokens * deployment.exchange_bytes


def test_on_cpu_every_layer_costs_two_messages() -> None:
    flags = {"parallel.cp": "2", "model.path": str(NANO), "model.device": "cpu"}
    exchange = load_engine("decode", CommandLine(flags), {}).config.parallel.exchange
    calls = _step_of_one_token(Mesh(cp=2), exchange)[0]
    n_messages = calls["all_reduce"] + calls["all_gather"] + calls["all_to_all"]
    assert n_messages == 2 * K3Spec.from_folder(NANO).num_layers + 2  # embedding and logits
