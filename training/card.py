"""The model card, written from the figures of a run (`eval.json`, `acceptance.json`) and its recipe."""

import json
from pathlib import Path
from typing import Any

from k3.bench.suites import NAMES
from training.recipe import Recipe


def card(folder: Path, recipe: Recipe) -> str:
    """Markdown; files that a phase has not written yet leave their table out."""
    target, drafter = recipe.target, recipe.drafter
    tokens = target.n_steps * target.n_tokens / 1e6
    parts = [
        _INTRODUCTION.format(tokens=tokens, **_numbers(recipe)),
        _accuracy(_load(folder / "eval.json")),
        _acceptance(_load(folder / "acceptance.json")),
        _LIMITS.format(n_prompts=drafter.n_prompts),
    ]
    return "\n".join(part for part in parts if part)


def _numbers(recipe: Recipe) -> dict[str, Any]:
    t, d = recipe.target, recipe.drafter
    return {
        "steps": t.n_steps,
        "batch": t.n_tokens,
        "seed": t.seed,
        "lr_muon": t.lr_muon,
        "lr_adam": t.lr_adam,
        "draft_steps": d.n_steps,
        "draft_seed": d.seed,
        "prompts": d.n_prompts,
        "middle": d.n_middle,
        "long": d.n_long,
    }


def _load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def _accuracy(report: dict[str, Any]) -> str:
    if not report:
        return ""
    lines = ["## Accuracy", "", "Greedy, bf16 on one H200, weights as shipped (MXFP4 experts).", ""]
    lines += [
        "| suite | correct | ends by itself | latents zeroed | states zeroed | n |",
        "|---|---|---|---|---|---|",
    ]
    for name in NAMES:
        if name not in report:
            continue
        row = report[name]
        zeroed = [report.get(f"{name}/{kind}") for kind in ("zero_latents", "zero_states")]
        cells = [f"{100 * z['accuracy']:.1f} %" if z else "" for z in zeroed]
        is_scored = row["accuracy"] is not None
        correct = f"{100 * row['accuracy']:.1f} %" if is_scored else "not scored"
        ends = f"{100 * row['self_ending']:.1f} %"
        lines.append(f"| {name} | {correct} | {ends} | {cells[0]} | {cells[1]} | {row['n']} |")
    groups = report.get("arith_skeletons", {}).get("by_skeleton")
    if groups:
        zero = sum(v == 0 for v in groups.values())
        full = sum(v == 1 for v in groups.values())
        lines += [
            "",
            f"Of the {len(groups)} unseen skeletons {full} are always solved and {zero} never (8 samples each).",
        ]
    return "\n".join([*lines, ""])


def _acceptance(report: dict[str, Any]) -> str:
    if not report:
        return ""
    lines = [
        "## Acceptance",
        "",
        "Emitted tokens per verify step at T=7, greedy rollouts; P(a >= 1..7) for the MLA flavour.",
        "",
    ]
    lines += ["| set | MLA | GQA | P(a >= 1..7) |", "|---|---|---|---|"]
    mla, gqa = report["mla"], report["gqa"]
    for name, row in mla.items():
        shares = " ".join(f"{p:.2f}" for p in row["p_at_least"])
        lines.append(f"| {name} | {row['length']:.2f} | {gqa[name]['length']:.2f} | {shares} |")
    return "\n".join([*lines, "", _ACCEPTANCE_NOTE, ""])


_INTRODUCTION = """# k3-mini

A 19.55 M-parameter language model with the architecture of Kimi-K3 (KDA and gated latent attention, block
attention residuals, latent mixture of experts) and two DSpark drafters, trained from nothing by `python -m
training.run --preset k3-mini`. It exists so that a serving system can be tried and measured on a model that has
learned something. It is not a general assistant.

## Data
Everything is made by code in `training/data` from seeds: word problems (an event grammar with more than 1e5
event sentences, 71 operation chains with at least five wordings each, bare calculations), recall of facts in
256 to 8,192 tokens with several questions as further turns, copying, small list tasks, tool calls in K3's form,
short fixed chat, continuation of natural text. The natural text is the docstrings of CPython's standard library
(copyright Python Software Foundation, PSF License Agreement version 2). Two sets are held out by template: 24
event sentences (*forms*) and 32 whole problems (*skeletons*); the grammar cannot make any of them, and all
their words occur in training. The programs of the skeletons do occur in training: what is unseen is the
wording, scene and number order.

## Recipe
Target: {steps} steps of {batch:,} packed tokens ({tokens:.0f} M), seed {seed}; Muon (rate {lr_muon}) on
matrices inside layers, AdamW ({lr_adam}) on the rest, bf16 activations over fp32 masters; just under ten
minutes on one H200. Experts are rounded to MXFP4 after training; every figure below is of the rounded model.
Drafters: two layers, taps 1 3 7 9 11 of the prefix stream, Markov rank 64, trained on {prompts:,} continuations
by the rounded target at temperatures 0, 0.7 and 1, and on {middle:,} recall documents of about 1k and {long:,}
of 1.5k to 4k tokens (gold answers); {draft_steps} steps, seed {draft_seed}; both flavours in under five
minutes, a third of it generation and taps.

`[MASK]` (id 4080) is the drafters' free slot; generation ends at `<|end_of_msg|>` (3842). `draft_window` is
null: full length.
"""

_ACCEPTANCE_NOTE = """\
`@256` shows a draft window of 256 rows: on recall the drafter must see the fact, so this is also the check that
draft rows really travel. `markov_off`, `taps_shuffled` and `slots_off_by_one` break the jointly trained drafter
at inference; they are not retrained variants. `@T1` is temperature 1; only `open` (continuing natural text) has
entropy there. The steps that reach the end of an answer emit what is left of it. For comparison, published
DSpark figures at T=7: GSM8K 5.4 to 6.2, MT-Bench 3.3 to 3.9."""

_LIMITS = """## Limits
* Arithmetic in the taught forms only: results 1 to 1999, one factor at most 12, at most six steps. On an unseen
  problem it often computes correctly with the wrong numbers.
* A fact that names its value before its key ("24809 is the code of the lamp") is recalled in about one case of
  seven; the fact suites state the key first.
* Chat answers are a few dozen fixed sentences. Everything else is answered with invention.
* The confidence heads are trained on the target's own text and not calibrated on rollouts.
* Two runs of the same commands on the same kind of machine are expected within a point; the bits of this one
  are not reproducible. With `--repeatable` they are: two runs of 15 steps on an H200 gave the same parameters.
"""
