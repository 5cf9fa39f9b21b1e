"""What is refused about speculation: rows of `refusals.py`. Prefill only hands the drafter's context over.

What a drafter's folder itself must not be (slot convention, taps, vocabulary, kinds of heads) is judged when it is read
(`k3/model/dspark_spec.py`) and shows here as DRAFTER.
"""

from __future__ import annotations

from pathlib import Path

from k3.calibration import Calibration
from k3.config import speculation
from k3.config.rule import Fit, Rule, unfit_drafter
from k3.config.tree import EngineConfig
from k3.errors import ConfigError
from k3.model.digest import model_digest

PREFILL, DECODE, ENGINES = ("prefill",), ("decode", "both"), ("prefill", "decode", "both")


def unfit_calibration(fit: Fit) -> str | None:
    """Why the calibration says nothing about this drafter."""
    spec = fit.config.spec
    if not spec.calibration or not spec.draft_tokens or unfit_drafter(fit):
        return None
    try:
        found = Calibration.read(Path(spec.calibration))
    except ConfigError as error:
        return str(error)
    if len(found.temperatures) < spec.draft_tokens:
        return (
            f"{spec.calibration} has temperatures of {len(found.temperatures)} drafts, "
            f"spec.draft_tokens={spec.draft_tokens}"
        )
    digest = model_digest(Path(spec.drafter))
    if found.drafter != digest:
        return (
            f"{spec.calibration} is of drafter {found.drafter[:12]}, spec.drafter is {digest[:12]}"
        )
    return None


def without_head(fit: Fit) -> bool:
    """Whether confidences are wanted of a drafter that has none."""
    draft = None if unfit_drafter(fit) else speculation.drafter(fit.config)
    return (
        draft is not None and speculation.is_by_confidence(fit.config) and not draft.has_confidence
    )


def _by_confidence(config: EngineConfig) -> bool:
    return config.spec.draft_schedule == "confidence"


SPEC_RULES: tuple[Rule[EngineConfig], ...] = (
    Rule(
        "DRAFTS_ON_PREFILL",
        PREFILL,
        ("spec.draft_tokens",),
        "spec.draft_tokens > 0 on prefill",
        "prefill hands the drafter's context over, it never proposes drafts",
        "set spec.draft_tokens on decode, and spec.drafter on both",
        lambda c: c.spec.draft_tokens > 0,
    ),
    Rule(
        "DRAFTS_WITHOUT_DRAFTER",
        DECODE,
        ("spec.draft_tokens", "spec.drafter"),
        "spec.draft_tokens > 0 without spec.drafter",
        "drafts need a model that proposes them",
        "set spec.drafter to the folder of a drafter of this model, or spec.draft_tokens=0",
        lambda c: c.spec.draft_tokens > 0 and not c.spec.drafter,
    ),
    Rule(
        "DRAFT_WINDOW",
        DECODE,
        ("spec.draft_window", "cache.page_tokens"),
        "spec.draft_window is not a multiple of cache.page_tokens",
        "a draft ring consists of whole pages",
        "round spec.draft_window up, or set it to 0 for the longest request",
        lambda c: c.spec.draft_window % c.cache.page_tokens != 0,
    ),
    Rule(
        "ACCEPTANCE_WITHOUT_DRAFTS",
        DECODE,
        ("spec.acceptance", "spec.draft_tokens"),
        "spec.acceptance = token or block without spec.draft_tokens",
        "there are no drafts to accept, so the rule would be ignored",
        "set spec.draft_tokens and spec.drafter, or spec.acceptance=match",
        lambda c: c.spec.acceptance != "match" and not c.spec.draft_tokens,
    ),
    Rule(
        "GATE_WITHOUT_DRAFTS",
        DECODE,
        ("spec.gate_window", "spec.draft_tokens"),
        "spec.gate_window > 0 without spec.draft_tokens",
        "there is nothing to switch off",
        "set spec.draft_tokens and spec.drafter, or spec.gate_window=0",
        lambda c: c.spec.gate_window > 0 and not c.spec.draft_tokens,
    ),
    Rule(
        "GATE_HELIX",
        DECODE,
        ("spec.gate_window", "parallel.cp"),
        "spec.gate_window > 0 together with parallel.cp > 1",
        "groups of changing width are untested on a ledger spread over ranks",
        "set spec.gate_window=0 or parallel.cp=1",
        lambda c: c.spec.gate_window > 0 and c.parallel.cp > 1,
    ),
    Rule(
        "GATE_PIPELINE",
        DECODE,
        ("spec.gate_window", "parallel.pp"),
        "spec.gate_window > 0 together with parallel.pp > 1",
        "all stages need groups of one width",
        "set spec.gate_window=0 or parallel.pp=1",
        lambda c: c.spec.gate_window > 0 and c.parallel.pp > 1,
    ),
    Rule(
        "CONFIDENCE_WITHOUT_DRAFTS",
        DECODE,
        ("spec.draft_schedule", "spec.draft_tokens"),
        "spec.draft_schedule = confidence or observe without spec.draft_tokens",
        "there are no drafts to choose from",
        "set spec.draft_tokens and spec.drafter, or spec.draft_schedule=fixed",
        lambda c: c.spec.draft_schedule != "fixed" and not c.spec.draft_tokens,
    ),
    Rule(
        "CONFIDENCE_HELIX",
        DECODE,
        ("spec.draft_schedule", "parallel.cp"),
        "spec.draft_schedule = confidence together with parallel.cp > 1",
        "groups of changing width are untested on a ledger spread over ranks",
        "set spec.draft_schedule=fixed or parallel.cp=1",
        lambda c: _by_confidence(c) and c.parallel.cp > 1,
    ),
    Rule(
        "CALIBRATION_UNUSED",
        DECODE,
        ("spec.calibration", "spec.draft_schedule", "spec.gate_window"),
        "spec.calibration with neither spec.draft_schedule = confidence nor a gate",
        "nothing would read it, though whoever set it expects that it decides",
        "set spec.draft_schedule=confidence or spec.gate_window, or remove spec.calibration",
        lambda c: bool(c.spec.calibration) and not _by_confidence(c) and not c.spec.gate_window,
    ),
    Rule(
        "CONFIDENCE_UNCALIBRATED",
        DECODE,
        ("spec.draft_schedule", "spec.calibration"),
        "spec.draft_schedule = confidence without spec.calibration",
        "neither what a step costs here nor what a confidence is worth is ever assumed",
        "measure a calibration with k3-bench calibrate, or set spec.draft_schedule=fixed",
        lambda c: _by_confidence(c) and not c.spec.calibration,
    ),
)

SPEC_FIT_RULES: tuple[Rule[Fit], ...] = (
    Rule(
        "DRAFTER",
        ENGINES,
        ("spec.drafter",),
        "spec.drafter is no drafter of this model",
        "a drafter shares the target's embedding and head and reads its layers; nothing about it is guessed",
        "point spec.drafter at the drafter released with the model, or leave it empty",
        unfit_drafter,
    ),
    Rule(
        "CONFIDENCE_HEAD",
        DECODE,
        ("spec.draft_schedule", "spec.drafter"),
        "spec.draft_schedule = confidence or observe with a drafter that has no confidence head",
        "nothing says which drafts are worth checking",
        "choose a drafter with enable_confidence_head, or set spec.draft_schedule=fixed",
        without_head,
    ),
    Rule(
        "CALIBRATION",
        DECODE,
        ("spec.calibration", "spec.drafter", "spec.draft_tokens"),
        "spec.calibration cannot be read, or is of another drafter or of fewer drafts",
        "what was measured for one drafter says nothing about another",
        "measure this drafter with k3-bench calibrate",
        unfit_calibration,
    ),
)
