# ruff: noqa: TID251  (asked at collection, before any device is opened)
"""Without a GPU Triton kernels run in the interpreter, which is chosen when a kernel is defined: before any import."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
