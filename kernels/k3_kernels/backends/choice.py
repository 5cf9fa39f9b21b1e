"""Attention, KDA and expert operations by name for one GPU. Libraries are imported here, when they are chosen, and never before.

A name that cannot run is refused with the remedy; only `auto` looks at what is installed, and says in its name what
it found.
"""

from __future__ import annotations

import torch

from k3_kernels.api import AttentionOps, BackendError, KdaOps, MoeOps

KDA = MOE = ("reference", "triton")
ATTENTION = ("reference", "triton", "flashmla", "flashinfer")
PACKAGES = {
    "triton": "triton",
    "flashmla": "sgl-flash-mla",
    "flashinfer": "flashinfer-python",
}


def cuda_attention(name: str, device: torch.device) -> tuple[str, AttentionOps]:
    """The concrete name and the operations of `auto` or one of ATTENTION, except `reference`. Raises BackendError."""
    properties = torch.cuda.get_device_properties(device)  # noqa: TID251
    n_sms, hopper = properties.multi_processor_count, properties.major == 9
    try:
        from k3_kernels.backends.auto import AutoAttention, installed_flashmla
        from k3_kernels.backends.flashinfer import FlashInferAttention
        from k3_kernels.backends.flashmla import FlashMlaAttention
        from k3_kernels.triton.mla_ops import TritonAttention
    except ImportError as error:
        raise _missing(name, "triton", error) from error
    try:
        match name:
            case "auto":
                library = installed_flashmla(n_sms) if hopper else None
                found = "triton" if library is None else "triton+flashmla"
                return found, AutoAttention(n_sms, library, hopper=hopper)
            case "triton":
                return name, TritonAttention(n_sms, hopper=hopper)
            case "flashmla" if hopper:
                return name, FlashMlaAttention(n_sms)
            case "flashinfer":
                return name, FlashInferAttention(n_sms, device, "fa3" if hopper else "fa2")
            case _:
                raise BackendError(
                    f"backends.attention={name!r}: not available on {properties.name}; available: auto, "
                    f"{', '.join(n for n in ATTENTION if hopper or n != 'flashmla')}; set backends.attention=auto"
                )
    except (ImportError, RuntimeError) as error:
        raise _missing(name, name, error) from error


def cuda_kda(name: str, device: torch.device) -> tuple[str, KdaOps]:
    """The concrete name and the operations of `auto` or `triton`. Raises BackendError."""
    _require_known("kda", name, KDA)
    try:
        from k3_kernels.triton.kda_ops import TritonKda
    except ImportError as error:
        raise _no_triton("kda", name, error) from error
    properties = torch.cuda.get_device_properties(device)  # noqa: TID251
    return "triton", TritonKda(hopper=properties.major == 9)


def cuda_moe(name: str, device: torch.device) -> tuple[str, MoeOps]:
    """The concrete name and the operations of `auto` or `triton`. Raises BackendError."""
    _require_known("moe", name, MOE)
    try:
        from k3_kernels.triton.moe_ops import TritonMoe
    except ImportError as error:
        raise _no_triton("moe", name, error) from error
    properties = torch.cuda.get_device_properties(device)  # noqa: TID251
    return "triton", TritonMoe(properties.multi_processor_count)


def _require_known(part: str, name: str, known: tuple[str, ...]) -> None:
    if name not in ("auto", *known):
        raise BackendError(
            f"backends.{part}={name!r}: not available; available: auto, {', '.join(known)}; set backends.{part}=auto"
        )


def _no_triton(part: str, name: str, error: ImportError) -> BackendError:
    return BackendError(
        f"backends.{part}={name!r}: triton cannot be loaded ({error}); pip install triton, or set "
        f"backends.{part}=reference"
    )


def _missing(name: str, part: str, error: Exception) -> BackendError:
    return BackendError(
        f"backends.attention={name!r}: {part} cannot be loaded ({error}); pip install {PACKAGES[part]}, or set "
        "backends.attention=reference"
    )
