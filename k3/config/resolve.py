"""Turns `auto`, empty and zero into concrete values, once per process. Pure: facts of the machine are arguments.

Names first (`resolve_names`: needs no model), then sizes (`resolve_sizes`: pages and the longest request follow from
the model's cache layout). Afterwards nothing in the tree means "decide later".
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from k3_kernels.cpu import library

import k3
from k3.config import speculation
from k3.config.caches import layout_of
from k3.config.tree import BackendsConfig, EngineConfig, ModelConfig, RouterConfig
from k3.model.spec import K3Spec

EMBEDDED_MODEL = Path(k3.__file__).parent / "assets" / "tiny"
EMBEDDED_NAME = "k3-mini"
DEFAULT_PORTS = {"prefill": 50051, "decode": 50052, "both": 50052}
GPU_DRIVER_FILES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts that `auto` depends on."""

    cores: int
    has_gpu: bool
    has_native: bool = False  # the native library for this CPU was built

    @classmethod
    def here(cls, environ: Mapping[str, str]) -> Machine:
        """This machine, seen without importing torch; the ranks check the device again."""
        is_hidden = environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1", "NoDevFiles")
        has_driver = any(path.exists() for path in GPU_DRIVER_FILES)
        return cls(len(os.sched_getaffinity(0)), has_driver and not is_hidden, library.is_built())


def resolve_model(model: ModelConfig, machine: Machine) -> ModelConfig:
    """Path, name, device and dtype; `max_model_len` stays."""
    path = Path(model.path).expanduser().resolve() if model.path else EMBEDDED_MODEL
    device = model.device if model.device != "auto" else "cuda" if machine.has_gpu else "cpu"
    dtype = model.dtype if model.dtype != "auto" else "bfloat16" if device == "cuda" else "float32"
    name = model.name or (path.name if model.path else EMBEDDED_NAME)
    return replace(model, path=str(path), name=name, device=device, dtype=dtype)


def resolve_drafter(drafter: str, model_path: str) -> str:
    """A folder: inside the model's folder when there is one of that name, else a path."""
    if not drafter:
        return ""
    inside = Path(model_path) / drafter
    return str(inside if inside.is_dir() else Path(drafter).expanduser().resolve())


def absolute(path: str) -> str:
    """A path without `~` and independent of the working directory; empty stays empty."""
    return str(Path(path).expanduser().resolve()) if path else ""


def resolve_router(config: RouterConfig, machine: Machine) -> RouterConfig:
    """The router's tree: only the model section has open values."""
    return replace(config, model=resolve_model(config.model, machine))


def _kernels(name: str, model: ModelConfig, machine: Machine) -> str:
    """On a GPU `auto` stays: a rank finds what is installed there. The native library has no bfloat16."""
    if name != "auto" or model.device != "cpu":
        return name
    return "native" if machine.has_native and model.dtype != "bfloat16" else "reference"


def _collectives(name: str, model: ModelConfig, machine: Machine) -> str:
    if name != "auto":
        return name
    return "shared" if model.device == "cpu" and machine.has_native else "torch"


def _moe_weights(backends: BackendsConfig, device: str) -> str:
    """Our GPU kernels read a quarter of the bytes and gain by it; elsewhere unpacking per use only costs."""
    if backends.moe_weights != "auto":
        return backends.moe_weights
    return "dequant" if device == "cpu" or backends.moe == "reference" else "packed"


def _graphs(config: EngineConfig) -> str:
    """`model.device` must be resolved. Prefill's steps are all different; stages' frames lie elsewhere each time."""
    if config.backends.graphs != "auto":
        return config.backends.graphs
    records = config.model.device == "cuda" and config.role != "prefill"
    return "on" if records and config.parallel.pp == 1 else "off"


def resolve_names(config: EngineConfig, machine: Machine) -> EngineConfig:
    """Everything that does not depend on the model: device, dtype, exchange, rollback, kernels, threads, port."""
    cache, backends, schedule = config.cache, config.backends, config.schedule
    extra = schedule.max_queue if config.role == "prefill" else 1  # decode keeps one dummy slot
    if config.role != "decode" and cache.prefix == "on":
        checkpoints = cache.checkpoints or 2 * schedule.max_rows + config.parallel.pp
        cache = replace(cache, checkpoints=checkpoints)
        extra += checkpoints
    n_ranks = config.parallel.pp * config.parallel.tp * config.parallel.cp
    model = resolve_model(config.model, machine)
    config = replace(config, model=model)
    parallel = config.parallel
    if parallel.exchange == "auto":
        # On CPU a message costs more than reading the weights that save one.
        parallel = replace(parallel, exchange="gather" if model.device == "cpu" else "value")
    return replace(
        config,
        parallel=parallel,
        spec=replace(
            config.spec,
            drafter=resolve_drafter(config.spec.drafter, model.path),
            kda_rollback=speculation.rollback(config),
            calibration=absolute(config.spec.calibration),
        ),
        cache=replace(cache, state_slots=cache.state_slots or schedule.max_rows + extra),
        backends=replace(
            backends,
            attention=_kernels(backends.attention, model, machine),
            kda=_kernels(backends.kda, model, machine),
            moe=_kernels(backends.moe, model, machine),
            graphs=_graphs(config),
            moe_weights=_moe_weights(backends, model.device),
            collectives=_collectives(backends.collectives, model, machine),
            threads=backends.threads or max(1, machine.cores // n_ranks),
        ),
        serve=replace(config.serve, port=config.serve.port or DEFAULT_PORTS[config.role]),
    )


def resolve_sizes(config: EngineConfig, spec: K3Spec) -> EngineConfig:
    """Pages of a pool, the longest request, the draft window. `config` must have passed the refusals."""
    if speculation.places(config, spec):
        tokens = speculation.window(config, spec)
        config = replace(config, spec=replace(config.spec, draft_window=tokens))
    cache, parallel = config.cache, config.parallel
    longest = config.model.max_model_len or spec.max_position_embeddings
    pages = cache.pages or pages_in_memory(config, spec)
    if not cache.pages and cache.prefix == "off":
        # Every holder of pages has a state slot: more pages than this could never be used.
        pages = min(pages, cache.state_slots * -(-longest // (cache.page_tokens * parallel.cp)))
    fits = min(longest, pages * cache.page_tokens * parallel.cp)
    return replace(
        config,
        model=replace(config.model, max_model_len=fits),
        cache=replace(cache, pages=pages),
    )


def pages_in_memory(config: EngineConfig, spec: K3Spec) -> int:
    """Pages that fit into `memory_bytes` beside the state slots, on the tightest stage; 0 or less if none."""
    cache, rings = config.cache, speculation.rings(config)
    return min(
        layout_of(config, spec, stage).pages_for(cache.memory_bytes, cache.state_slots, rings)
        for stage in range(config.parallel.pp)
    )
