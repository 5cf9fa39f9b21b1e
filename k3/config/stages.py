"""What the configuration says about pipeline stages: the mesh, the layers of each, how long their steps are. Pure."""

from __future__ import annotations

from math import inf, nan

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


def chunk_costs(config: EngineConfig) -> tuple[float, float, float, float] | None:
    """Relative costs of a prefill step: itself, a cached token, a token, a pair of tokens; None = chunks of one length.

    Raises ConfigError, CHUNK_COSTS, for a text that is not four such numbers.
    """
    text = config.schedule.chunk_costs
    if not text:
        return None
    try:
        step, cached, token, pair = (float(part) for part in text.split(","))
    except ValueError:
        step = cached = token = pair = nan
    if not (all(0 <= cost < inf for cost in (step, cached, token, pair)) and token + pair):
        raise ConfigError(
            f"schedule.chunk_costs={text!r}: expected four numbers from 0, the last two not both 0",
            code="CHUNK_COSTS",
        )
    return step, cached, token, pair


def unfit_chunk_costs(config: EngineConfig) -> str | None:
    """What is wrong with them."""
    try:
        chunk_costs(config)
    except ConfigError as error:
        return str(error)
    return None
