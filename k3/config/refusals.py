"""What is refused at start-up: one table, judged before any rank is spawned, all violated rules at once.

A rule is a row of documentation (`when`, `why`, `remedy`) plus a test that returns the offending values as text, or
None when the rule is kept. `ENGINE` and `ROUTER` rules see the configuration alone, `FIT` rules see it beside the
model. `python -m k3.config.refusals` prints `docs/refusals.md`.
A wrong request is rejected, not refused: that happens elsewhere, at request time.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from k3.config.resolve import GPU_DRIVER_FILES, pages_in_memory
from k3.config.tree import EngineConfig, ModelConfig, RouterConfig
from k3.errors import ModelError
from k3.model.spec import K3Spec

S = TypeVar("S")

PREFILL, DECODE, ENGINES, ROUTERS = (
    ("prefill",),
    ("decode", "both"),
    ("prefill", "decode", "both"),
    ("router",),
)
NOT_YET = "not available in this version"
_PATTERN = re.compile(r"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._*-]+):(\d{1,5}|\*)")
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+):\d{1,5}")
_ANY_HOST = ("", "0.0.0.0", "::", "[::]")


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
    """One row of the table. `test(subject)` returns the offending values, or None when the rule is kept."""

    code: str
    roles: tuple[str, ...]
    when: str
    why: str
    remedy: str
    test: Callable[[S], str | None]


class Fit(NamedTuple):
    """A configuration beside the model it is for."""

    config: EngineConfig
    spec: K3Spec


def refuse(config: EngineConfig, spec: K3Spec | None) -> list[Refusal]:
    """Every violated rule of an engine. `spec` is None when the model cannot be read; a rule says so."""
    found = _judge(ENGINE, config, config.role)
    return found if spec is None else found + _judge(FIT, Fit(config, spec), config.role)


def refuse_router(config: RouterConfig) -> list[Refusal]:
    """Every violated rule of the router."""
    return _judge(ROUTER, config, "router")


def _judge(rules: Iterable[Rule[S]], subject: S, role: str) -> list[Refusal]:
    found: list[Refusal] = []
    for rule in rules:
        if role in rule.roles and (values := rule.test(subject)) is not None:
            found.append(Refusal(rule.code, values, rule.why, rule.remedy))
    return found


# ---------------------------------------------------------------- tests that need more than one line


def _missing_model(model: ModelConfig) -> str | None:
    if (Path(model.path) / "config.json").is_file():
        return None
    return f"model.path={model.path!r} has no config.json"


def _unreadable_model(model: ModelConfig) -> str | None:
    if _missing_model(model):
        return None
    try:
        K3Spec.from_folder(Path(model.path))
    except ModelError as error:
        return str(error)
    return None


def _missing_files(files: dict[str, str]) -> str | None:
    missing = [
        f"{key}={path!r}" for key, path in files.items() if path and not Path(path).is_file()
    ]
    return ", ".join(missing) or None


def _half_pair(cert: str, key: str, prefix: str) -> str | None:
    if bool(cert) == bool(key):
        return None
    return f"{prefix}.tls_cert={cert!r}, {prefix}.tls_key={key!r}"


def _same_port(a: tuple[str, int], b: tuple[str, int], names: str) -> str | None:
    overlaps = a[0] == b[0] or a[0] in _ANY_HOST or b[0] in _ANY_HOST
    return names if overlaps and a[1] == b[1] != 0 else None


def _bad_port_range(c: EngineConfig) -> str | None:
    text = c.transfer.port_range
    if not text:
        return None
    match = re.fullmatch(r"(\d+)-(\d+)", text)
    if match is None or not 1024 <= int(match[1]) <= int(match[2]) <= 65535:
        return f"transfer.port_range={text!r}"
    low, high = int(match[1]), int(match[2])
    for name, port in (("serve.port", c.serve.port), ("serve.ops_port", c.serve.ops_port)):
        if low <= port <= high:
            return f"transfer.port_range={text!r} contains {name}={port}"
    return None


def _bad_addresses(addresses: Iterable[str], form: re.Pattern[str], name: str) -> str | None:
    bad = [a for a in addresses if not form.fullmatch(a)]
    return f"{name} holds {', '.join(map(repr, bad))}" if bad else None


def _twice(addresses: tuple[str, ...]) -> str | None:
    twice = sorted({a for a in addresses if addresses.count(a) > 1})
    return f"fleet names {', '.join(twice)} more than once" if twice else None


def _indivisible(fit: Fit) -> str | None:
    n = fit.config.parallel.tp * fit.config.parallel.cp
    heads = {"attention heads": fit.spec.mla.n_heads, "KDA heads": fit.spec.kda_heads}
    bad = [f"{count} {name}" for name, count in heads.items() if count % n]
    return f"tp * cp = {n} does not divide {' and '.join(bad)}" if bad else None


def _no_page_fits(fit: Fit) -> str | None:
    c = fit.config
    if c.cache.pages or _indivisible(fit) or c.parallel.pp > fit.spec.num_layers:
        return None
    if pages_in_memory(c, fit.spec) > 0:
        return None
    return f"cache.memory_bytes={c.cache.memory_bytes} with cache.state_slots={c.cache.state_slots}"


def _pool_below_longest(fit: Fit) -> str | None:
    c = fit.config
    room = c.cache.pages * c.cache.page_tokens * c.parallel.cp
    if not c.cache.pages or not c.model.max_model_len or room >= c.model.max_model_len:
        return None
    return f"model.max_model_len={c.model.max_model_len}, but cache.pages={c.cache.pages} hold {room} tokens"


def _when(condition: bool, values: str) -> str | None:
    return values if condition else None


# ---------------------------------------------------------------- the table

ENGINE: tuple[Rule[EngineConfig], ...] = (
    Rule(
        "ROLE_BOTH",
        DECODE,
        "role = both",
        f"a decode instance that also computes prompts is {NOT_YET}",
        "run k3-prefill beside k3-decode",
        lambda c: _when(c.role == "both", "role=both"),
    ),
    Rule(
        "MODEL_FOLDER",
        ENGINES,
        "model.path is not a model folder",
        "there is no model to serve",
        "point model.path at a folder with config.json and safetensors, or leave it empty for the embedded model",
        lambda c: _missing_model(c.model),
    ),
    Rule(
        "MODEL_CONFIG",
        ENGINES,
        "config.json of the model is not one of this family",
        "nothing about a model is ever guessed",
        "take config.json from the released checkpoint",
        lambda c: _unreadable_model(c.model),
    ),
    Rule(
        "DEVICE",
        ENGINES,
        "model.device = cuda without a GPU driver",
        "no GPU driver file exists on this machine",
        "set model.device=cpu or auto",
        lambda c: _when(
            c.model.device == "cuda" and not any(p.exists() for p in GPU_DRIVER_FILES),
            "model.device=cuda",
        ),
    ),
    Rule(
        "HELIX_PREFILL",
        PREFILL,
        "parallel.cp > 1 on prefill",
        "the context path computes whole prompts and cannot run on a ledger spread over ranks",
        "set parallel.cp=1 on prefill; decode may differ",
        lambda c: _when(c.parallel.cp > 1, f"parallel.cp={c.parallel.cp}"),
    ),
    Rule(
        "HELIX_PIPELINE",
        DECODE,
        "parallel.cp > 1 together with parallel.pp > 1",
        "context parallel decode over pipeline stages is untested",
        "set parallel.pp=1 or parallel.cp=1",
        lambda c: _when(
            c.parallel.cp > 1 and c.parallel.pp > 1,
            f"parallel.cp={c.parallel.cp}, parallel.pp={c.parallel.pp}",
        ),
    ),
    Rule(
        "PP_NOT_AVAILABLE",
        ENGINES,
        "parallel.pp > 1",
        f"pipeline stages are {NOT_YET}",
        "set parallel.pp=1",
        lambda c: _when(c.parallel.pp > 1, f"parallel.pp={c.parallel.pp}"),
    ),
    Rule(
        "TP_NOT_AVAILABLE",
        ENGINES,
        "parallel.tp > 1",
        f"tensor parallelism is {NOT_YET}",
        "set parallel.tp=1",
        lambda c: _when(c.parallel.tp > 1, f"parallel.tp={c.parallel.tp}"),
    ),
    Rule(
        "CP_NOT_AVAILABLE",
        DECODE,
        "parallel.cp > 1",
        f"helix context parallelism is {NOT_YET}",
        "set parallel.cp=1",
        lambda c: _when(c.parallel.cp > 1, f"parallel.cp={c.parallel.cp}"),
    ),
    Rule(
        "DRAFTS_NOT_AVAILABLE",
        ENGINES,
        "spec.draft_tokens > 0",
        f"speculation is {NOT_YET}",
        "set spec.draft_tokens=0",
        lambda c: _when(c.spec.draft_tokens > 0, f"spec.draft_tokens={c.spec.draft_tokens}"),
    ),
    Rule(
        "PREFIX_ON_DECODE",
        DECODE,
        "cache.prefix = on for decode",
        "decode reuses no pages between requests; the prefix cache is prefill's",
        "set cache.prefix=off on decode",
        lambda c: _when(c.cache.prefix == "on", "cache.prefix=on"),
    ),
    Rule(
        "PREFIX_NOT_AVAILABLE",
        PREFILL,
        "cache.prefix = on for prefill",
        f"the hybrid prefix cache is {NOT_YET}",
        "set cache.prefix=off",
        lambda c: _when(c.cache.prefix == "on", "cache.prefix=on"),
    ),
    Rule(
        "PAGE_TOKENS",
        ENGINES,
        "cache.page_tokens is not a power of two",
        "kernels and the transfer address tokens of a page by shifts; both sides of a pair need the same size",
        "set cache.page_tokens to 4, 8, 16, 32, 64 or 128",
        lambda c: _when(
            c.cache.page_tokens & (c.cache.page_tokens - 1) != 0,
            f"cache.page_tokens={c.cache.page_tokens}",
        ),
    ),
    Rule(
        "STATE_SLOTS",
        DECODE,
        "cache.state_slots < 2 on decode",
        "one state slot is a dummy, so no request could run",
        "set cache.state_slots to at least 2, or 0 for auto",
        lambda c: _when(c.cache.state_slots < 2, f"cache.state_slots={c.cache.state_slots}"),
    ),
    Rule(
        "BUDGET_PAGE",
        PREFILL,
        "schedule.token_budget < cache.page_tokens",
        "a step must be able to complete at least one page",
        "raise schedule.token_budget or lower cache.page_tokens",
        lambda c: _when(
            c.schedule.token_budget < c.cache.page_tokens,
            f"schedule.token_budget={c.schedule.token_budget}, cache.page_tokens={c.cache.page_tokens}",
        ),
    ),
    Rule(
        "FENCE_CLOCKS",
        ENGINES,
        "transfer.self_fence_s + transfer.drain_s >= transfer.lease_s",
        "prefill must be quiet before decode gives a transfer up, else a late write lands in pages of another request",
        "raise transfer.lease_s or lower transfer.self_fence_s or transfer.drain_s",
        lambda c: _when(
            c.transfer.self_fence_s + c.transfer.drain_s >= c.transfer.lease_s,
            f"{c.transfer.self_fence_s:g} + {c.transfer.drain_s:g} >= {c.transfer.lease_s:g} s",
        ),
    ),
    Rule(
        "HEARTBEAT_CLOCK",
        ENGINES,
        "2 * transfer.heartbeat_s > transfer.self_fence_s",
        "one late heartbeat would stop every transfer",
        "lower transfer.heartbeat_s to at most half of transfer.self_fence_s",
        lambda c: _when(
            2 * c.transfer.heartbeat_s > c.transfer.self_fence_s,
            f"2 * {c.transfer.heartbeat_s:g} > {c.transfer.self_fence_s:g} s",
        ),
    ),
    Rule(
        "PROGRESS_CLOCK",
        ENGINES,
        "transfer.progress_timeout_s < transfer.handle_deadline_s",
        "decode would abort a transfer while prefill still waits for one handle",
        "raise transfer.progress_timeout_s to at least transfer.handle_deadline_s",
        lambda c: _when(
            c.transfer.progress_timeout_s < c.transfer.handle_deadline_s,
            f"{c.transfer.progress_timeout_s:g} < {c.transfer.handle_deadline_s:g} s",
        ),
    ),
    Rule(
        "PORT_RANGE",
        ENGINES,
        "transfer.port_range is malformed or contains a port of ours",
        "the data plane binds every port of the range",
        "use low-high within 1024..65535 apart from the other ports",
        _bad_port_range,
    ),
    Rule(
        "SAME_PORT",
        ENGINES,
        "serve.port = serve.ops_port on one address",
        "two servers cannot share a port",
        "choose another serve.ops_port",
        lambda c: _same_port(
            (c.serve.host, c.serve.port),
            (c.serve.ops_host, c.serve.ops_port),
            f"serve.port={c.serve.port}, serve.ops_port={c.serve.ops_port}",
        ),
    ),
    Rule(
        "PREFILL_PATTERNS",
        DECODE,
        "serve.prefills has an entry that is not host:port",
        "decode dials only addresses that match the list",
        "write host:port; * matches any host part or any port",
        lambda c: _bad_addresses(c.serve.prefills, _PATTERN, "serve.prefills"),
    ),
    Rule(
        "TLS_PAIR",
        ENGINES,
        "only one of serve.tls_cert and serve.tls_key is set",
        "a certificate is useless without its key",
        "set both or neither",
        lambda c: _half_pair(c.serve.tls_cert, c.serve.tls_key, "serve"),
    ),
    Rule(
        "TLS_FILES",
        ENGINES,
        "a TLS file does not exist",
        "the server could not start with TLS",
        "correct the path or remove the setting",
        lambda c: _missing_files(
            {
                "serve.tls_cert": c.serve.tls_cert,
                "serve.tls_key": c.serve.tls_key,
                "serve.tls_ca": c.serve.tls_ca,
            }
        ),
    ),
    Rule(
        "TLS_CLIENT_AUTH",
        ENGINES,
        "serve.tls_client_auth without serve.tls_cert and serve.tls_ca",
        "client certificates are checked against tls_ca on a TLS server",
        "set serve.tls_cert, serve.tls_key and serve.tls_ca, or serve.tls_client_auth=false",
        lambda c: _when(
            c.serve.tls_client_auth and not (c.serve.tls_cert and c.serve.tls_ca),
            "serve.tls_client_auth=true",
        ),
    ),
)

FIT: tuple[Rule[Fit], ...] = (
    Rule(
        "HEADS",
        ENGINES,
        "tp * cp does not divide the attention heads or the KDA heads",
        "every rank holds the same number of whole heads",
        "choose tp * cp among the common divisors of both",
        _indivisible,
    ),
    Rule(
        "STAGES",
        ENGINES,
        "parallel.pp exceeds the layers of the model",
        "a stage holds at least one layer",
        "lower parallel.pp",
        lambda f: _when(
            f.config.parallel.pp > f.spec.num_layers,
            f"parallel.pp={f.config.parallel.pp}, {f.spec.num_layers} layers",
        ),
    ),
    Rule(
        "MODEL_LEN",
        ENGINES,
        "model.max_model_len exceeds the model's own limit",
        "the model was not trained for longer contexts",
        "lower model.max_model_len, or 0 for the model's limit",
        lambda f: _when(
            f.config.model.max_model_len > f.spec.max_position_embeddings,
            f"model.max_model_len={f.config.model.max_model_len}, the model has {f.spec.max_position_embeddings}",
        ),
    ),
    Rule(
        "POOL_BELOW_MODEL_LEN",
        ENGINES,
        "cache.pages hold fewer tokens than model.max_model_len",
        "a request of that length could never be admitted",
        "raise cache.pages, or lower model.max_model_len (0 = what fits)",
        _pool_below_longest,
    ),
    Rule(
        "MEMORY",
        ENGINES,
        "no page fits into cache.memory_bytes beside the state slots",
        "a rank needs room for its state slots and at least one page",
        "raise cache.memory_bytes or lower cache.state_slots (schedule.max_rows)",
        _no_page_fits,
    ),
)

ROUTER: tuple[Rule[RouterConfig], ...] = (
    Rule(
        "ROUTER_MODEL_FOLDER",
        ROUTERS,
        "model.path is not a model folder",
        "the router needs the tokenizer and the chat format of the model",
        "point model.path at the model folder, or leave it empty for the embedded model",
        lambda c: _missing_model(c.model),
    ),
    Rule(
        "ROUTER_SAME_PORT",
        ROUTERS,
        "http.port = http.admin_port on one address",
        "two servers cannot share a port",
        "choose another http.admin_port",
        lambda c: _same_port(
            (c.http.host, c.http.port),
            (c.http.admin_host, c.http.admin_port),
            f"http.port={c.http.port}, http.admin_port={c.http.admin_port}",
        ),
    ),
    Rule(
        "FLEET_ADDRESSES",
        ROUTERS,
        "fleet.prefills or fleet.decodes has an entry that is not host:port",
        "the router cannot dial it",
        "write host:port",
        lambda c: _bad_addresses((*c.fleet.prefills, *c.fleet.decodes), _ADDRESS, "fleet"),
    ),
    Rule(
        "FLEET_TWICE",
        ROUTERS,
        "an address appears twice in fleet.prefills and fleet.decodes",
        "an instance has one role and one entry",
        "name every instance once",
        lambda c: _twice((*c.fleet.prefills, *c.fleet.decodes)),
    ),
    Rule(
        "FLEET_TLS_PAIR",
        ROUTERS,
        "only one of fleet.tls_cert and fleet.tls_key is set",
        "a certificate is useless without its key",
        "set both or neither",
        lambda c: _half_pair(c.fleet.tls_cert, c.fleet.tls_key, "fleet"),
    ),
    Rule(
        "FLEET_TLS_CA",
        ROUTERS,
        "fleet.tls_cert without fleet.tls_ca",
        "without authorities the channels use no TLS and the certificate would never be shown",
        "set fleet.tls_ca as well",
        lambda c: _when(
            bool(c.fleet.tls_cert) and not c.fleet.tls_ca, f"fleet.tls_cert={c.fleet.tls_cert!r}"
        ),
    ),
    Rule(
        "FLEET_TLS_FILES",
        ROUTERS,
        "a TLS file does not exist",
        "the channels could not use TLS",
        "correct the path or remove the setting",
        lambda c: _missing_files(
            {
                "fleet.tls_ca": c.fleet.tls_ca,
                "fleet.tls_cert": c.fleet.tls_cert,
                "fleet.tls_key": c.fleet.tls_key,
            }
        ),
    ),
)


def document() -> str:
    """The table as Markdown: `docs/refusals.md`."""
    lines = [
        "# Refusals",
        "",
        "Judged at start-up, all at once; the process exits with 2. Generated from `k3/config/refusals.py`",
        "(`python -m k3.config.refusals > docs/refusals.md`). `--check` judges without starting.",
        "",
        "| code | process | refused when | why | what to do |",
        "|---|---|---|---|---|",
    ]
    for rule in (*ENGINE, *FIT, *ROUTER):
        who = ", ".join("k3-" + r for r in rule.roles if r != "both")
        lines.append(f"| {rule.code} | {who} | {rule.when} | {rule.why} | {rule.remedy} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(document())
