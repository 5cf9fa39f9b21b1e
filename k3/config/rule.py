"""The parts of a refusal: `Rule` (a row of the table), `Refusal` (a violated one), and the tests that need a function.

A test answers None or False when the rule is kept, True when it is violated (the values shown are those of the rule's
keys), or the offending values as text. The table itself is `refusals.py`.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from k3.config import speculation
from k3.config.keys import flatten
from k3.config.resolve import pages_in_memory
from k3.config.stages import unfit_stages
from k3.config.tree import EngineConfig, ModelConfig
from k3.errors import ModelError
from k3.model.spec import K3Spec
from k3.ports import is_address

S = TypeVar("S")

ANY_HOST = ("", "0.0.0.0", "::", "[::]")


class Refusal(NamedTuple):
    """One violated rule, with the values that violate it."""

    code: str
    values: str
    why: str
    remedy: str

    def __str__(self) -> str:
        """`CODE: values: why; remedy`."""
        return f"{self.code}: {self.values}: {self.why}; {self.remedy}"


@dataclass(frozen=True, slots=True)
class Rule(Generic[S]):
    """One row of the table. `keys` are the settings it is about; `roles` the processes it holds for."""

    code: str
    roles: tuple[str, ...]
    keys: tuple[str, ...]
    when: str
    why: str
    remedy: str
    test: Callable[[S], bool | str | None]

    def judge(self, subject: S, config: object) -> Refusal | None:
        """The refusal, or None when the rule is kept. `config` is where the keys are looked up."""
        verdict = self.test(subject)
        if verdict is None or verdict is False:
            return None
        if verdict is True:
            values = flatten(config)
            verdict = ", ".join(f"{key}={values[key]}" for key in self.keys)
        return Refusal(self.code, verdict, self.why, self.remedy)


def markdown(rules: Iterable[Rule[Any]]) -> str:
    """The documentation of rules: `docs/refusals.md`."""
    lines = [
        "# Refusals",
        "",
        "Judged at start-up, all at once; the process exits with 2. `--check` judges without starting.",
        "Generated: `python -m k3.config.refusals > docs/refusals.md`.",
        "",
        "| code | process | refused when | why | what to do |",
        "|---|---|---|---|---|",
    ]
    for rule in rules:
        names = [r for r in rule.roles if r != "both" or "decode" not in rule.roles]
        who = ", ".join("k3-decode --role both" if r == "both" else f"k3-{r}" for r in names)
        lines.append(f"| {rule.code} | {who} | {rule.when} | {rule.why} | {rule.remedy} |")
    return "\n".join(lines) + "\n"


class Fit(NamedTuple):
    """A configuration beside the model it is for."""

    config: EngineConfig
    spec: K3Spec


def missing_model(model: ModelConfig) -> bool:
    """Whether model.path has no config.json."""
    return not (Path(model.path) / "config.json").is_file()


def unreadable_model(model: ModelConfig) -> str | None:
    """What is wrong with an existing config.json."""
    if missing_model(model):
        return None
    try:
        K3Spec.from_folder(Path(model.path))
    except ModelError as error:
        return str(error)
    return None


def unusable_tls(config: object, section: str) -> str | None:
    """Files of `section` (tls_cert, tls_key, tls_ca) that do not exist, or do not hold what they should."""
    values = flatten(config)
    cert, key, ca = (str(values[f"{section}.{name}"]) for name in ("tls_cert", "tls_key", "tls_ca"))
    missing = [path for path in (cert, key, ca) if path and not Path(path).is_file()]
    if missing:
        return f"no such file: {', '.join(missing)}"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        if cert and key:
            context.load_cert_chain(cert, key, password="")
        if ca:
            context.load_verify_locations(ca)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        return f"{section}.tls_*: {error}"
    return None


def is_same_port(a: tuple[str, int], b: tuple[str, int]) -> bool:
    """Whether two (host, port) would meet; port 0 is any free one."""
    overlaps = a[0] == b[0] or a[0] in ANY_HOST or b[0] in ANY_HOST
    return overlaps and a[1] == b[1] != 0


def bad_port_range(c: EngineConfig) -> bool | str:
    """Malformed, or containing a port of ours."""
    match = re.fullmatch(r"(\d+)-(\d+)", c.transfer.port_range)
    if match is None:
        return c.transfer.port_range != ""
    low, high = int(match[1]), int(match[2])
    for name, port in (("serve.port", c.serve.port), ("serve.ops_port", c.serve.ops_port)):
        if low <= port <= high:
            return f"transfer.port_range={c.transfer.port_range} contains {name}={port}"
    return not 1024 <= low <= high <= 65535


def bad_addresses(addresses: Iterable[str], form: re.Pattern[str]) -> str | None:
    """Addresses that do not have the form."""
    bad = [repr(a) for a in addresses if not is_address(a, form)]
    return f"address {', '.join(bad)}" if bad else None


def repeated(addresses: tuple[str, ...]) -> str | None:
    """Addresses that appear more than once."""
    twice = sorted({a for a in addresses if addresses.count(a) > 1})
    return f"address {', '.join(twice)}" if twice else None


def indivisible(fit: Fit) -> str | None:
    """Axes of the model that are split over the ranks of a stage and that tp * cp does not divide."""
    n, spec = fit.config.parallel.tp * fit.config.parallel.cp, fit.spec
    axes = {
        "attention heads": spec.mla.n_heads,
        "KDA heads": spec.kda_heads,
        "experts": spec.moe.n_experts,
        "columns of the shared experts": spec.moe.shared_width,
        "columns of the dense layers": spec.dense_width,
        "vocabulary rows": spec.vocab_size,
    }
    bad = [f"{size} {name}" for name, size in axes.items() if size % n]
    return f"tp * cp = {n} does not divide {', '.join(bad)}" if bad else None


def unfit_drafter(fit: Fit) -> str | None:
    """Why the drafter cannot serve this model with this configuration."""
    c = fit.config
    try:
        draft = speculation.drafter(c)
        if draft is None:
            return None
        draft.check_target(fit.spec)
        if c.spec.draft_tokens:
            draft.block(c.spec.draft_tokens)
    except ModelError as error:
        return str(error)
    n = c.parallel.tp * c.parallel.cp
    bad = [f"{size} {axis}" for axis, size in draft.split_axes().items() if size % n]
    return f"tp * cp = {n} does not divide the drafter's {', '.join(bad)}" if bad else None


def no_page_fits(fit: Fit) -> bool:
    """Whether the memory holds not even one page; only where a rank's share is defined at all."""
    c = fit.config
    has_share = (
        not indivisible(fit)
        and not unfit_drafter(fit)
        and unfit_stages(c, fit.spec.num_layers) is None
    )
    return not c.cache.pages and has_share and pages_in_memory(c, fit.spec) < 1


def pool_below_longest(fit: Fit) -> bool:
    """Whether a pool of given size cannot hold one request of the given longest length."""
    c = fit.config
    return 0 < c.cache.pages * c.cache.page_tokens * c.parallel.cp < c.model.max_model_len
