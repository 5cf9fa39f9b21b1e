"""The training forward against the published mathematics, against `k3.model`, and against its own cached generation."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tests.golden.k3.twin import mxfp4_tensors
from tests.model_runner import Pools, solo_stage
from training import mxfp4
from training.dims import Dims
from training.export import from_hf, read_folder, to_hf, write_shards
from training.generate import Generator
from training.kernels import Layout, ReferenceKernels
from training.optimizer import Optimizer, orthogonalize
from training.parameters import initial, is_bf16, is_muon, shapes
from training.recipe import Recipe, model_config
from training.target import LayeredParams, Target

GOLDEN = Path(__file__).parents[2] / "golden/k3"
CPU = torch.device("cpu")


def load(config: str, tensors: dict[str, torch.Tensor]) -> tuple[Dims, dict[str, torch.Tensor]]:
    dims = Dims.of(json.loads((GOLDEN / config).read_text()))
    return dims, from_hf(tensors, dims.kda_heads)


@pytest.fixture(scope="module")
def nano() -> tuple[Dims, dict[str, torch.Tensor]]:
    return load("config.json", load_file(GOLDEN / "model.safetensors"))


def logits_of(
    dims: Dims, flat: dict[str, torch.Tensor], documents: list[torch.Tensor]
) -> list[torch.Tensor]:
    lengths = torch.tensor([0, *map(len, documents)])
    layout = Layout.of(lengths.cumsum(0), CPU)
    params = LayeredParams.of(flat, dims.n_layers, torch.float32)
    hidden = Target(dims, ReferenceKernels())(torch.cat(documents), layout, params).hidden
    return list(F.linear(hidden, flat["lm_head.weight"]).split([len(d) for d in documents]))


def test_packed_documents_give_the_golden_logits_each_on_its_own(nano) -> None:
    cases = load_file(GOLDEN / "cases.safetensors")
    names = ["case0", "case1", "case2"]
    got = logits_of(*nano, [cases[f"{name}.input_ids"] for name in names])
    for name, logits in zip(names, got, strict=True):
        assert (logits - cases[f"{name}.logits"]).abs().max() < 1e-4, name


def test_packed_experts_give_the_golden_logits() -> None:
    cases = load_file(GOLDEN / "cases-mxfp4.safetensors")
    model = load("config-mxfp4.json", mxfp4_tensors())
    (logits,) = logits_of(*model, [cases["mxfp4.input_ids"]])
    assert (logits - cases["mxfp4.logits"]).abs().max() < 1e-4


def test_training_forward_equals_the_served_model(nano) -> None:
    ids = torch.randint(0, 512, (83,), generator=torch.Generator().manual_seed(4))
    (logits,) = logits_of(*nano, [ids])
    stage = solo_stage(GOLDEN, "float32")
    pools = Pools(stage, 1, len(ids), page_tokens=16)
    served = pools.prefill(pools.requests[0], ids.tolist(), 32)
    assert (served[-1] - logits[-1]).abs().max() < 1e-4


def test_cached_generation_equals_argmax_of_the_uncached_forward(nano) -> None:
    dims, flat = nano
    params = LayeredParams.of(flat, dims.n_layers, torch.float32)
    generator = Generator(Target(dims, ReferenceKernels()), params, 511, (510,), CPU)
    prompts = [[5, 9, 300], list(range(20, 61)), [7]]
    for prompt, answer in zip(prompts, generator.run(prompts, 9), strict=True):
        (logits,) = logits_of(dims, flat, [torch.tensor(prompt + answer)])
        logits[:, 510] = float("-inf")
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer


def test_initial_parameters_are_the_shipped_size_and_take_a_gradient_step() -> None:
    dims = Dims.of(model_config())
    assert sum(torch.Size(shape).numel() for shape in shapes(dims).values()) == 19_552_552


def test_checkpoint_tensors_survive_writing_in_shards(nano, tmp_path: Path) -> None:
    dims, flat = nano
    write_shards(to_hf(flat), tmp_path)
    (tmp_path / "config.json").write_text("{}")
    back = from_hf(read_folder(tmp_path)[1], dims.kda_heads)
    assert back.keys() == flat.keys()
    for name, value in flat.items():
        if ".experts.w" in name:
            assert (back[name] - value).norm() / value.norm() < 0.13, name
        else:
            exact = is_bf16(name) or name in ("model.embed_tokens.weight", "lm_head.weight")
            expected = value.bfloat16().float() if exact else value
            assert torch.equal(back[name], expected), name


def test_mxfp4_unpacks_the_golden_and_packing_is_idempotent() -> None:
    parts = load_file(GOLDEN / "components.safetensors")
    unpacked = mxfp4.unpack(parts["mxfp4.packed"], parts["mxfp4.scale"])
    assert torch.equal(unpacked, parts["mxfp4.w"])
    assert torch.equal(mxfp4.unpack(*mxfp4.pack(unpacked)), unpacked)


def test_mxfp4_refuses_a_width_that_is_no_multiple_of_the_group() -> None:
    with pytest.raises(ValueError, match="multiple of 32"):
        mxfp4.pack(torch.zeros(2, 33))


def test_orthogonalized_matrices_have_singular_values_near_one() -> None:
    x = torch.randn(3, 24, 63, generator=torch.Generator().manual_seed(2))
    values = torch.linalg.svdvals(orthogonalize(x))
    assert values.min() > 0.5
    assert values.max() < 1.4


def test_a_restored_optimizer_continues_exactly(nano) -> None:
    dims, _ = nano

    def fresh() -> Optimizer:
        values = {
            n: v for n, v in initial(dims, 3).items() if ".layers." not in n or ".layers.4." in n
        }
        return Optimizer(
            values, is_muon, lambda n: "gate.weight" in n, lambda n: "correction" in n, torch.float32, 0.01, 0.01
        )  # fmt: skip

    def step(optimizer: Optimizer, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        for leaf in optimizer.leaves.values():
            if leaf.requires_grad:
                leaf.grad = torch.randn(leaf.shape, generator=rng)
        optimizer.step(0.5)

    first, second = fresh(), fresh()
    step(first, 1)
    second.restore({name: value.clone() for name, value in first.state().items()})
    for optimizer in (first, second):
        step(optimizer, 2)
    for name, value in first.masters().items():
        assert torch.equal(value, second.masters()[name]), name


def test_learning_rate_warms_up_stays_flat_and_ends_at_two_percent() -> None:
    recipe = Recipe().target
    assert recipe.factor(0) == pytest.approx(1 / recipe.warmup)
    assert recipe.factor(recipe.n_steps // 2) == 1.0
    assert recipe.factor(recipe.n_steps) == pytest.approx(recipe.final)
