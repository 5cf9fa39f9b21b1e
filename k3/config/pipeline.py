"""What is refused over pipeline stages: rows of `refusals.py` that look at the stages as a whole.

`PIPELINE_RULES` are judged on a `Pipeline`, the facts that decide, in the order of the table; one stage passes all.
Prefill never speculates and launches no graphs, so most rules are not for it. Pure.
Golden: prefix/config_refusals.json.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from k3.config.rule import Fit, Rule
from k3.config.stages import unfit_stages
from k3.config.tree import EngineConfig
from k3.model.dspark_spec import METHOD, PIPELINE_PAIRS
from k3.model.spec import FAMILY

Option = Literal["two_batch_overlap", "paged_checkpoints", "decode_graphs", "confidence"]
ENGINES, GENERATING = ("prefill", "decode", "both"), ("decode", "both")


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What decides whether a service may run over `pp` stages.

    drafter: how a drafter of this service proposes, None where it does not speculate. options: what is switched on;
    two-batch overlap and page-backed checkpoints have no key in this version.
    """

    role: str
    pp: int
    model: str
    drafter: str | None = None
    options: frozenset[Option] = frozenset()
    has_remote_kv: bool = False

    @classmethod
    def of(cls, config: EngineConfig) -> Pipeline:
        """The facts of a configuration; models and drafters of other families are refused when they are read."""
        options: dict[Option, bool] = {
            "confidence": config.spec.draft_schedule != "fixed",
            "decode_graphs": config.backends.graphs == "on",
        }
        return cls(
            role=config.role,
            pp=config.parallel.pp,
            model=FAMILY,
            drafter=METHOD if config.spec.draft_tokens else None,
            options=frozenset(name for name, is_on in options.items() if is_on),
            has_remote_kv=config.parallel.pp_remote_kv,
        )


def _over_stages(test: Callable[[Pipeline], bool]) -> Callable[[Pipeline], bool]:
    return lambda p: p.pp > 1 and test(p)


PIPELINE_RULES: tuple[Rule[Pipeline], ...] = (
    Rule(
        "PP_TBO",
        ENGINES,
        ("parallel.pp",),
        "two-batch overlap together with parallel.pp > 1",
        "both split a step, and the stages' frames are fixed by the plan",
        "leave two-batch overlap off, or set parallel.pp=1",
        _over_stages(lambda p: "two_batch_overlap" in p.options),
    ),
    Rule(
        "PP_PAGED_CHECKPOINT",
        ENGINES,
        ("parallel.pp",),
        "page-backed state checkpoints together with parallel.pp > 1",
        "all stages would have to agree at once who owns the pages of a state",
        "keep checkpoints in state slots, or set parallel.pp=1",
        _over_stages(lambda p: "paged_checkpoints" in p.options),
    ),
    Rule(
        "PP_REMOTE_KV",
        ("decode",),
        ("parallel.pp", "parallel.pp_remote_kv"),
        "parallel.pp > 1 on plain decode without parallel.pp_remote_kv",
        "every stage takes caches from a prefill instance, which is a feature of its own",
        "set parallel.pp_remote_kv=true, or parallel.pp=1",
        _over_stages(lambda p: not p.has_remote_kv),
    ),
    Rule(
        "PP_CUDA_GRAPH",
        GENERATING,
        ("backends.graphs", "parallel.pp"),
        "backends.graphs = on together with parallel.pp > 1",
        "a graph cannot replay a step whose frame lies elsewhere each time",
        "set backends.graphs=off or auto, or parallel.pp=1",
        _over_stages(lambda p: "decode_graphs" in p.options),
    ),
    Rule(
        "PP_SPEC_PAIR",
        GENERATING,
        ("parallel.pp", "spec.drafter"),
        "speculation over stages with a pair of model and drafter that is not known to work",
        "taps have to be relayed and the drafter needs the target's embedding on the last stage",
        "set spec.draft_tokens=0, or parallel.pp=1",
        _over_stages(
            lambda p: p.drafter is not None and (p.model, p.drafter) not in PIPELINE_PAIRS
        ),
    ),
    Rule(
        "PP_CONFIDENCE",
        GENERATING,
        ("parallel.pp",),
        "confidence-scheduled verification together with parallel.pp > 1",
        "all stages need groups of one width",
        "switch confidence scheduling off, or set parallel.pp=1",
        _over_stages(lambda p: "confidence" in p.options),
    ),
)


def _unfit(code: str) -> Callable[[Fit], str | None]:
    """What is wrong with the layout of the layers, when it is `code`."""

    def test(fit: Fit) -> str | None:
        error = unfit_stages(fit.config, fit.spec.num_layers)
        return str(error) if error is not None and error.code == code else None

    return test


def _stage_rule(code: str, when: str, why: str, remedy: str) -> Rule[Fit]:
    return Rule(
        code, ENGINES, ("parallel.pp", "parallel.partition"), when, why, remedy, _unfit(code)
    )


STAGE_RULES: tuple[Rule[Fit], ...] = (
    _stage_rule(
        "PP_GT_LAYERS",
        "parallel.pp exceeds the layers of the model",
        "a stage holds at least one layer",
        "lower parallel.pp",
    ),
    _stage_rule(
        "PP_PARTITION_TEXT",
        "parallel.partition is not a list of numbers",
        "it says how many layers each stage holds",
        "write layers per stage, as in 5,4, or leave it empty for the balanced split",
    ),
    _stage_rule(
        "PP_PARTITION_COUNT",
        "parallel.partition has more or fewer entries than parallel.pp",
        "it says how many layers each stage holds",
        "write one number per stage, or leave it empty for the balanced split",
    ),
    _stage_rule(
        "PP_PARTITION_EMPTY",
        "parallel.partition has a stage without layers",
        "a stage holds at least one layer",
        "give every stage a layer, or leave it empty for the balanced split",
    ),
    _stage_rule(
        "PP_PARTITION_SUM",
        "the entries of parallel.partition do not add up to the layers of the model",
        "every layer lies on one stage",
        "make the numbers add up, or leave it empty for the balanced split",
    ),
)
