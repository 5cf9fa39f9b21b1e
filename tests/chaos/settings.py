"""Flags of the clusters that chaos tests start."""

from __future__ import annotations

from pathlib import Path

LONG = 1600  # tokens of a prompt that is still being computed while a test looks and strikes: 400 plans of 4
ENDLESS = 3600  # output tokens of a generation that somebody ends; nearly all the pools hold
BUDGET = ("--schedule-token-budget", "4")
PAGE = 4  # tokens of a page where prompts take their time; a plan must be able to complete one


def flags(folder: Path, *more: str) -> tuple[str, ...]:
    """An engine on k3-nano in float64 with pools small enough to see every page."""
    return _engine(folder, 16, *more)


def slow_flags(folder: Path, *more: str) -> tuple[str, ...]:
    """The same memory in pages of `PAGE` tokens."""
    return _engine(folder, PAGE, *more)


def router_flags(folder: Path, *more: str) -> tuple[str, ...]:
    """The router for the same model."""
    return ("--model-path", str(folder), *more)


def _engine(folder: Path, page_tokens: int, *more: str) -> tuple[str, ...]:
    return (
        "--model-path", str(folder), "--model-dtype", "float64", "--cache-page-tokens", str(page_tokens),
        "--cache-pages", str(4096 // page_tokens), *more,
    )  # fmt: skip
