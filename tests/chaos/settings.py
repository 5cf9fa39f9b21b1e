"""Flags of the clusters that chaos tests start."""

from __future__ import annotations

from pathlib import Path


def flags(folder: Path, *more: str) -> tuple[str, ...]:
    """An engine on k3-nano in float64 with pools small enough to see every page."""
    return (
        "--model-path", str(folder), "--model-dtype", "float64", "--cache-page-tokens", "16",
        "--cache-pages", "256", *more,
    )  # fmt: skip


def router_flags(folder: Path, *more: str) -> tuple[str, ...]:
    """The router for the same model."""
    return ("--model-path", str(folder), *more)
