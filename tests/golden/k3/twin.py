"""The MXFP4 twin of the golden model: packed experts, and every other tensor as in `model.safetensors`."""

from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

HERE = Path(__file__).parent


def mxfp4_tensors() -> dict[str, Tensor]:
    """All tensors of the packed checkpoint, by their stored names."""
    whole = load_file(HERE / "model.safetensors")
    rest = {name: t for name, t in whole.items() if ".block_sparse_moe.experts." not in name}
    return rest | load_file(HERE / "experts-mxfp4.safetensors")
