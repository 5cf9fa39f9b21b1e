# ruff: noqa: TID251  (how many GPUs there are)
"""Router and engines as processes on GPUs give the recorded answers of the trained model."""

from __future__ import annotations

import json

import httpx
import pytest
import torch

from k3.cluster import LocalCluster, Options
from k3.config.resolve import EMBEDDED_MODEL

SAMPLES = json.loads((EMBEDDED_MODEL / "samples.json").read_text())[:3]
GPU = ("--model-device", "cuda", "--drafter", "draft-mla")
DRAFTING = ("--draft-tokens", "7")
TESTED = ("--transfer-min-bandwidth", "0.01")  # GB/s: the self-test must come to a figure


def need(n_gpus: int) -> None:
    if torch.cuda.device_count() < n_gpus:
        pytest.skip(f"needs {n_gpus} GPUs; torch sees {torch.cuda.device_count()}")


def check_answers(cluster: LocalCluster) -> None:
    with httpx.Client(timeout=60.0, trust_env=False) as client:
        for sample in SAMPLES:
            asked = {
                "prompt": sample["prompt_ids"],
                "max_tokens": len(sample["answer_ids"]),
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            answer = client.post(f"{cluster.url}/v1/completions", json=asked)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["token_ids"] == sample["answer_ids"]


@pytest.mark.parametrize(
    ("prefill_gpus", "decode_gpus"),
    [("0", "0"), ("0", "1"), ("0", "0,1")],
    ids=["one GPU", "a GPU each", "decode over two"],
)
def test_services_on_gpus_give_the_recorded_answers(prefill_gpus: str, decode_gpus: str) -> None:
    """Caches and draft rows cross by NIXL; over two GPUs the steps hold NCCL's collectives."""
    need(1 + int(max(f"{prefill_gpus},{decode_gpus}".split(","))))
    cp = ("--cp", str(len(decode_gpus.split(","))))
    flags = (*GPU, *TESTED)
    cluster = LocalCluster(Options(prefill_flags=flags, decode_flags=(*flags, *DRAFTING, *cp)))
    cluster.prefills[0].env = {"CUDA_VISIBLE_DEVICES": prefill_gpus}
    cluster.decodes[0].env = {"CUDA_VISIBLE_DEVICES": decode_gpus}
    with cluster:
        check_answers(cluster)


@pytest.mark.parametrize("drafting", [(), DRAFTING], ids=["plain", "dspark"])
def test_an_instance_alone_on_a_gpu_gives_the_recorded_answers(drafting: tuple[str, ...]) -> None:
    """Nothing is transferred: chunks and verify steps of one process share the pools."""
    flags = (*GPU, *drafting, "--role", "both", "--model-max-model-len", "1024")
    with LocalCluster(Options(n_prefills=0, decode_flags=flags)) as cluster:
        check_answers(cluster)
