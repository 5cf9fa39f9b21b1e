# ruff: noqa: TID251  (how many GPUs there are)
"""Router, prefill and decode as processes on GPUs give the recorded answers of the trained model."""

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


@pytest.mark.parametrize(
    ("prefill_gpus", "decode_gpus"),
    [("0", "0"), ("0", "1"), ("0", "0,1")],
    ids=["one GPU", "a GPU each", "decode over two"],
)
def test_services_on_gpus_give_the_recorded_answers(prefill_gpus: str, decode_gpus: str) -> None:
    """Caches and draft rows cross by NIXL; over two GPUs the steps hold NCCL's collectives."""
    wanted = 1 + int(max(f"{prefill_gpus},{decode_gpus}".split(",")))
    if torch.cuda.device_count() < wanted:
        pytest.skip(f"needs {wanted} GPUs; torch sees {torch.cuda.device_count()}")
    cp = str(len(decode_gpus.split(",")))
    cluster = LocalCluster(Options(prefill_flags=GPU, decode_flags=(*GPU, *DRAFTING, "--cp", cp)))
    cluster.prefills[0].env = {"CUDA_VISIBLE_DEVICES": prefill_gpus}
    cluster.decodes[0].env = {"CUDA_VISIBLE_DEVICES": decode_gpus}
    with cluster, httpx.Client(timeout=60.0, trust_env=False) as client:
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
