"""GPUs and RDMA: what the values give a pod, and that its process computes there with as many ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from k3.config.stages import mesh_of
from tests.chart.rendered import CHART, ENGINES, VALUES, Helm, Rendered, load

GPU = "nvidia.com/gpu"
GPUS = CHART / "examples/gpu-1p1d.yaml"


@pytest.mark.parametrize("component", ENGINES)
def test_every_rank_has_a_gpu_of_its_own(
    rendered: Rendered, component: str, tmp_path: Path
) -> None:
    config = load(component, rendered.config(component), tmp_path)
    gpus = rendered.container(component)["resources"]["limits"].get(GPU, 0)
    assert config.model.device == ("cuda" if gpus else "cpu")
    assert gpus in (0, mesh_of(config).size)


def test_the_example_computes_on_one_and_two_gpus(
    render: Callable[..., Rendered], tmp_path: Path
) -> None:
    r = render(GPUS)
    limits = {c: r.container(c)["resources"]["limits"] for c in ENGINES}
    assert {c: limit[GPU] for c, limit in limits.items()} == {"prefill": 1, "decode": 2}
    assert all(limit["memory"] for limit in limits.values())
    prefill, decode = (load(c, r.config(c), tmp_path) for c in ENGINES)
    assert decode.parallel.cp == 2
    assert prefill.cache.page_tokens == decode.cache.page_tokens
    assert prefill.model.dtype == decode.model.dtype == "bfloat16"


def test_stages_and_tensor_ranks_count_as_well(
    render: Callable[..., Rendered], tmp_path: Path
) -> None:
    sizes = ("prefill.config.parallel.pp=2", "prefill.config.parallel.tp=2")
    r = render(VALUES[0], *sizes, "prefill.gpu.count=4", "prefill.gpu.resourceName=example.com/g")
    assert r.container("prefill")["resources"]["limits"]["example.com/g"] == 4
    assert load("prefill", r.config("prefill"), tmp_path).parallel.pp == 2
    assert load("decode", r.config("decode"), tmp_path).model.device == "cpu"


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ("decode.gpu.count=3", "set decode.gpu.count=2 or change parallel"),
        ("prefill.config.parallel.tp=2", "pp * tp * cp of prefill.config.parallel is 2"),
        (r"transfer.ucxTls=self\,tcp\,cuda_ipc", "add cuda_copy"),
        ("prefill.gpu.count=17", "count"),
        ("prefill.gpu.count=one", "count"),
        ("prefill.gpu.resourceName=gpu", "resourceName"),
        ("prefill.gpu.number=1", "number"),
        ("prefill.rdma.count=0", "count"),
        ("decode.rdma.resource=rdma/ib", "resource"),
        ("decode.config.model.device=cpu", "device"),
        ("transfer.ucxNetDevices=mlx5_0 mlx5_1", "ucxNetDevices"),
    ],
)
def test_devices_that_do_not_fit_are_refused_by_name(
    helm: Helm, settings: str, complaint: str
) -> None:
    done = helm("template", "k3", str(CHART), "--values", str(GPUS), "--set", settings)
    assert done.returncode != 0
    assert complaint in done.stderr


def test_rdma_brings_devices_and_the_right_to_lock_memory(
    render: Callable[..., Rendered],
) -> None:
    r = render(GPUS, "decode.rdma.enabled=true", "decode.rdma.count=2")
    decode, prefill = r.container("decode"), r.container("prefill")
    assert decode["resources"]["limits"]["rdma/ib"] == 2
    assert decode["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert "rdma/ib" not in prefill["resources"]["limits"]
    assert prefill["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_both_engines_hear_how_to_reach_each_other_and_an_own_variable_wins(
    render: Callable[..., Rendered],
) -> None:
    r = render(
        VALUES[0],
        r"transfer.ucxTls=self\,tcp",
        "transfer.ucxNetDevices=eth0",
        "decode.extraEnv[0].name=UCX_NET_DEVICES",
        "decode.extraEnv[0].value=eth1",
    )
    envs = {c: r.container(c).get("env", []) for c in ("router", *ENGINES)}
    said = {c: [(e["name"], e["value"]) for e in env] for c, env in envs.items()}
    assert said == {
        "router": [],
        "prefill": [("UCX_NET_DEVICES", "eth0"), ("UCX_TLS", "self,tcp")],
        "decode": [("UCX_TLS", "self,tcp"), ("UCX_NET_DEVICES", "eth1")],
    }
