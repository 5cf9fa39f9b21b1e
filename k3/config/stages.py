"""What the configuration says about the mesh: its sizes, and which layers each pipeline stage holds. Pure."""

from __future__ import annotations

from k3.config.tree import EngineConfig
from k3.errors import ConfigError
from k3.parallel.mesh import Mesh


def mesh_of(config: EngineConfig) -> Mesh:
    """The ranks of a service. Raises ConfigError, PP_PARTITION_TEXT, for a partition that is no list of numbers."""
    parallel = config.parallel
    counts = [part.strip() for part in parallel.partition.split(",") if part.strip()]
    if not all(part.isdecimal() for part in counts):
        raise ConfigError(
            f"parallel.partition={parallel.partition!r}: expected layers per stage, as in 5,4",
            code="PP_PARTITION_TEXT",
        )
    return Mesh(parallel.pp, parallel.tp, parallel.cp, tuple(map(int, counts)) or None)


def unfit_stages(config: EngineConfig, num_layers: int) -> ConfigError | None:
    """Why the layers of the model cannot be laid out as the configuration says."""
    try:
        mesh_of(config).stage_layers(num_layers)
    except ConfigError as error:
        return error
    return None
