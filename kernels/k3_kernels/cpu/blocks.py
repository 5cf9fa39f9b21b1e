"""Structures that the library's blocks read: the constants of a layer, gathered once, passed by address.

Field by field as in `src/*.cpp`; the order is the layout. Whoever makes one keeps the tensors it points to.
"""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int64, c_void_p

from k3_kernels.cpu.dense import Packed
from k3_kernels.drafts import DraftPlace
from k3_kernels.reference.group import GroupCache


class Matrix(ctypes.Structure):
    """`src/gemm.h`; without data: no such matrix."""

    _fields_ = (
        ("data", c_void_p),
        ("outputs", c_int64),
        ("inputs", c_int64),
        ("is_narrow", c_int64),
    )

    @classmethod
    def of(cls, packed: Packed | None) -> Matrix:
        """Of one matrix, or of the first of several."""
        if packed is None:
            return cls()
        return cls(packed.data.data_ptr(), packed.outputs, packed.inputs, packed.is_narrow)


class KdaPools(ctypes.Structure):
    """`src/kda_group.cpp`."""

    _fields_ = (
        *((name, c_void_p) for name in ("states", "windows", "tails", "records")),
        *(
            (f"{name}_{unit}", c_int64)
            for name in ("state", "window", "tail", "record")
            for unit in ("slot", "head")
        ),
        *((name, c_int64) for name in ("columns", "tail_tokens", "record_tokens")),
    )

    @classmethod
    def of(cls, cache: GroupCache) -> KdaPools:
        """A head's own values must be contiguous."""
        pools = (cache.states, cache.windows, cache.tails)
        records = cache.records
        for pool in (*pools, *(() if records is None else (records,))):
            assert pool.shape[2] == 0 or pool[0, 0].is_contiguous(), f"pool: {pool.stride()}"
        return cls(
            *(pool.data_ptr() for pool in pools),
            None if records is None else records.data_ptr(),
            *(step for pool in pools for step in pool.stride()[:2]),
            *((0, 0) if records is None else records.stride()[:2]),
            *(cache.columns, cache.tails.shape[3]),
            0 if records is None else records.shape[3],
        )


class KdaBlock(ctypes.Structure):
    """`src/kda_group.cpp`."""

    _fields_ = (
        *((name, Matrix) for name in ("entry", "gate_up", "decay_up", "out")),
        *((name, c_void_p) for name in ("taps", "bias", "decay", "norm")),
        *((name, c_int64) for name in ("heads", "dim", "conv", "gate_width")),
        *((name, c_double) for name in ("bound", "eps", "norm_eps")),
    )


class MlaBlock(ctypes.Structure):
    """`src/mla_decode.cpp`."""

    _fields_ = (
        *((name, Matrix) for name in ("entry", "query_up", "out")),
        *((name, c_void_p) for name in ("latent_norm", "query_norm", "key_up", "value_up")),
        *((name, c_int64) for name in ("heads", "nope", "rope", "rank", "value_dim")),
        *((name, c_int64) for name in ("query_width", "has_gate", "head_stride")),
        *((name, c_double) for name in ("scale", "eps")),
    )


class MoeBlock(ctypes.Structure):
    """`src/moe.cpp`."""

    _fields_ = (
        *((name, c_void_p) for name in ("gate", "bias", "norm")),
        *((name, Matrix) for name in ("down", "w13", "w2", "up", "shared_up", "shared_down")),
        *((name, c_int64) for name in ("first", "experts", "width", "k", "groups")),
        *((name, c_int64) for name in ("kept_groups", "is_softmax", "renormalize")),
        *((name, c_double) for name in ("scaling", "beta", "linear_beta", "eps")),
    )


class DraftBlock(ctypes.Structure):
    """`src/draft.cpp`."""

    _fields_ = (
        *((name, Matrix) for name in ("query_down", "query_up", "entry", "out", "gate_up", "down")),
        *((name, c_void_p) for name in ("input_norm", "query_norm", "latent_norm")),
        *((name, c_void_p) for name in ("key_up", "value_up", "mlp_norm", "frequencies")),
        *((name, c_int64) for name in ("heads", "nope", "rope", "rank", "value_dim")),
        *((name, c_int64) for name in ("head_stride", "is_interleaved")),
        *((name, c_double) for name in ("scale", "eps", "amplitude")),
    )


class DraftRows(ctypes.Structure):
    """`src/draft.cpp`."""

    _fields_ = (("entry", Matrix), ("norm", c_void_p))


class DraftContext(ctypes.Structure):
    """`src/draft.cpp`."""

    _fields_ = (
        *(("projection", Matrix), ("norm", c_void_p), ("frequencies", c_void_p)),
        ("layers", c_void_p),
        *((name, c_int64) for name in ("n_layers", "rank", "rope", "is_interleaved")),
        *((name, c_double) for name in ("eps", "amplitude")),
    )


class DraftRing(ctypes.Structure):
    """`src/draft.cpp`."""

    _fields_ = (
        ("pool", c_void_p),
        *((f"{name}_stride", c_int64) for name in ("unit", "layer", "token")),
        *((name, c_int64) for name in ("places", "page_tokens", "window")),
    )

    @classmethod
    def of(cls, place: DraftPlace) -> DraftRing:
        """Of a pool [units, layers, tokens, width]."""
        pool = place.pool
        assert pool.dim() == 4, f"pool: {tuple(pool.shape)}, expected rows of latent attention"
        assert pool.stride(3) == 1, f"pool: strides {pool.stride()}"
        return cls(pool.data_ptr(), *pool.stride()[:3], place.places, pool.shape[2], place.window)
