"""What is refused at start-up: one table, judged before any rank is spawned, all violated rules at once.

`IDLE` rules (`idle.py`) see what somebody set, `ENGINE` and `ROUTER` rules (`router_refusals.py`) the configuration
alone, `FIT` rules see it beside the model. A rule is documentation and test in one row (`rule.py`);
`python -m k3.config.refusals` prints `docs/refusals.md`. A wrong request is rejected, not refused: that happens
elsewhere, at request time.
"""

from __future__ import annotations

import sys

from k3.config.idle import IDLE_RULES
from k3.config.pipeline import PIPELINE_RULES, STAGE_RULES, Pipeline
from k3.config.resolve import GPU_DRIVER_FILES
from k3.config.router_refusals import ROUTER_RULES
from k3.config.rule import (
    Fit,
    Refusal,
    Rule,
    bad_addresses,
    bad_port_range,
    indivisible,
    is_same_port,
    markdown,
    missing_model,
    no_page_fits,
    pool_below_longest,
    unreadable_model,
    unusable_tls,
)
from k3.config.spec_rules import SPEC_FIT_RULES, SPEC_RULES
from k3.config.stages import unfit_chunk_costs
from k3.config.tree import EngineConfig, RouterConfig
from k3.model.spec import K3Spec
from k3.ports import PATTERN

PREFILL, DECODE, ENGINES = ("prefill",), ("decode", "both"), ("prefill", "decode", "both")
COMPUTES = ("prefill", "both")  # prompts
TRANSFERS = ("prefill", "decode")
GPU_ATTENTION = ("triton", "flashmla", "flashinfer")

ENGINE_RULES: tuple[Rule[EngineConfig], ...] = (
    Rule(
        "MODEL_FOLDER",
        ENGINES,
        ("model.path",),
        "model.path has no config.json",
        "there is no model to serve",
        "point model.path at a folder with config.json and safetensors, or leave it empty for the embedded model",
        lambda c: missing_model(c.model),
    ),
    Rule(
        "MODEL_CONFIG",
        ENGINES,
        ("model.path",),
        "config.json of the model is not one of this family",
        "nothing about a model is ever guessed",
        "take config.json from the released checkpoint",
        lambda c: unreadable_model(c.model),
    ),
    Rule(
        "DEVICE",
        ENGINES,
        ("model.device",),
        "model.device = cuda without a GPU driver",
        "no GPU driver file exists on this machine",
        "set model.device=cpu or auto",
        lambda c: c.model.device == "cuda" and not any(f.exists() for f in GPU_DRIVER_FILES),
    ),
    Rule(
        "GPU_ATTENTION",
        ENGINES,
        ("backends.attention", "model.device"),
        "backends.attention = triton, flashmla or flashinfer on a CPU",
        "these are kernels for GPUs",
        "set backends.attention=auto, or model.device=cuda",
        lambda c: c.model.device == "cpu" and c.backends.attention in GPU_ATTENTION,
    ),
    Rule(
        "GRAPHS_ON_CPU",
        ENGINES,
        ("backends.graphs", "model.device"),
        "backends.graphs = on on a CPU",
        "only a GPU can record its work",
        "set backends.graphs=auto, or model.device=cuda",
        lambda c: c.model.device == "cpu" and c.backends.graphs == "on",
    ),
    Rule(
        "SHARED_ON_GPU",
        ENGINES,
        ("backends.collectives", "model.device"),
        "backends.collectives = shared on a GPU",
        "tensors of a GPU do not lie in the memory that processes share",
        "set backends.collectives=auto, or model.device=cpu",
        lambda c: c.model.device == "cuda" and c.backends.collectives == "shared",
    ),
    Rule(
        "FLASHMLA_PAGES",
        ENGINES,
        ("backends.attention", "cache.page_tokens"),
        "backends.attention = flashmla with cache.page_tokens other than 64",
        "FlashMLA reads pages of 64 tokens",
        "set cache.page_tokens=64, or backends.attention=auto",
        lambda c: c.backends.attention == "flashmla" and c.cache.page_tokens != 64,
    ),
    Rule(
        "HELIX_PREFILL",
        PREFILL,
        ("parallel.cp",),
        "parallel.cp > 1 on prefill",
        "the context path computes whole prompts and cannot run on a ledger spread over ranks",
        "set parallel.cp=1 on prefill; decode may differ",
        lambda c: c.parallel.cp > 1,
    ),
    Rule(
        "HELIX_BOTH",
        DECODE,
        ("role", "parallel.cp"),
        "role = both together with parallel.cp > 1",
        "a prompt computed on the ranks of a spread ledger would reserve too little of it",
        "run k3-prefill beside k3-decode, or set parallel.cp=1",
        lambda c: c.role == "both" and c.parallel.cp > 1,
    ),
    Rule(
        "LOCAL_PREFILL_CP",
        DECODE,
        ("schedule.local_prefill_max", "parallel.cp"),
        "schedule.local_prefill_max > 0 together with parallel.cp > 1",
        "chunks of a prompt run on one rank's pages, not on a ledger spread over ranks",
        "set schedule.local_prefill_max=0 and let prefill compute every prompt, or set parallel.cp=1",
        lambda c: c.schedule.local_prefill_max > 0 and c.parallel.cp > 1,
    ),
    Rule(
        "LOCAL_PREFILL_BUDGET",
        ("decode",),
        ("schedule.local_prefill_max", "schedule.token_budget", "cache.page_tokens"),
        "schedule.local_prefill_max > 0 with schedule.token_budget < cache.page_tokens",
        "a step must be able to complete at least one page",
        "raise schedule.token_budget or lower cache.page_tokens",
        lambda c: (
            c.schedule.local_prefill_max > 0 and c.schedule.token_budget < c.cache.page_tokens
        ),
    ),
    Rule(
        "LOCAL_PREFILL_ROLE",
        ("prefill", "both"),
        ("role", "schedule.local_prefill_max"),
        "schedule.local_prefill_max > 0 on an instance that computes every prompt",
        "the bound says which prompts a decode instance takes from prefill instances",
        "leave schedule.local_prefill_max at 0, or start the instance as plain decode",
        lambda c: c.schedule.local_prefill_max > 0,
    ),
    Rule(
        "HELIX_PIPELINE",
        DECODE,
        ("parallel.cp", "parallel.pp"),
        "parallel.cp > 1 together with parallel.pp > 1",
        "context parallel decode over pipeline stages is untested",
        "set parallel.pp=1 or parallel.cp=1",
        lambda c: c.parallel.cp > 1 and c.parallel.pp > 1,
    ),
    *SPEC_RULES,
    Rule(
        "PREFIX_ON_DECODE",
        ("decode",),
        ("cache.prefix",),
        "cache.prefix = on for plain decode",
        "decode reuses no pages between requests; the prefix cache is where prompts are computed",
        "set cache.prefix=off on decode, or role=both for an instance that computes every prompt",
        lambda c: c.cache.prefix == "on",
    ),
    Rule(
        "PREFIX_INTERVAL",
        COMPUTES,
        ("cache.prefix", "cache.checkpoint_interval", "cache.page_tokens"),
        "cache.prefix = on with cache.checkpoint_interval < cache.page_tokens",
        "states are kept at page boundaries, and pages without a state behind them cannot be used again",
        "set cache.checkpoint_interval to at least cache.page_tokens, or cache.prefix=off",
        lambda c: c.cache.prefix == "on" and c.cache.checkpoint_interval < c.cache.page_tokens,
    ),
    Rule(
        "PAGE_TOKENS",
        ENGINES,
        ("cache.page_tokens",),
        "cache.page_tokens is not a power of two",
        "a page must divide evenly among kernels and transfers, and be the same on both sides of a pair",
        "set cache.page_tokens to 4, 8, 16, 32, 64 or 128",
        lambda c: c.cache.page_tokens & (c.cache.page_tokens - 1) != 0,
    ),
    Rule(
        "STATE_SLOTS",
        DECODE,
        ("cache.state_slots",),
        "cache.state_slots < 2 on decode",
        "one state slot is a dummy, so no request could run",
        "set cache.state_slots to at least 2, or 0 for auto",
        lambda c: c.cache.state_slots < 2,
    ),
    Rule(
        "BUDGET_PAGE",
        COMPUTES,
        ("schedule.token_budget", "cache.page_tokens"),
        "schedule.token_budget < cache.page_tokens",
        "a step must be able to complete at least one page",
        "raise schedule.token_budget or lower cache.page_tokens",
        lambda c: c.schedule.token_budget < c.cache.page_tokens,
    ),
    Rule(
        "CHUNK_COSTS",
        ENGINES,
        ("schedule.chunk_costs",),
        "schedule.chunk_costs is not four numbers from 0, the last two not both 0",
        "the length of a chunk is computed from them",
        "give the costs of a step, a cached token, a token and a pair of tokens, or leave it empty",
        unfit_chunk_costs,
    ),
    Rule(
        "FENCE_CLOCKS",
        TRANSFERS,
        ("transfer.self_fence_s", "transfer.drain_s", "transfer.lease_s"),
        "self_fence_s + drain_s >= lease_s",
        "prefill must be quiet before decode gives a transfer up, else a late write lands in pages of another request",
        "raise transfer.lease_s or lower transfer.self_fence_s or transfer.drain_s",
        lambda c: c.transfer.self_fence_s + c.transfer.drain_s >= c.transfer.lease_s,
    ),
    Rule(
        "HEARTBEAT_CLOCK",
        TRANSFERS,
        ("transfer.heartbeat_s", "transfer.self_fence_s"),
        "2 * heartbeat_s > self_fence_s",
        "one late heartbeat would stop every transfer",
        "lower transfer.heartbeat_s to at most half of transfer.self_fence_s",
        lambda c: 2 * c.transfer.heartbeat_s > c.transfer.self_fence_s,
    ),
    Rule(
        "PROGRESS_CLOCK",
        TRANSFERS,
        ("transfer.progress_timeout_s", "transfer.handle_deadline_s"),
        "progress_timeout_s < handle_deadline_s",
        "decode would abort a transfer while prefill still waits for one handle",
        "raise transfer.progress_timeout_s to at least transfer.handle_deadline_s",
        lambda c: c.transfer.progress_timeout_s < c.transfer.handle_deadline_s,
    ),
    Rule(
        "PORT_RANGE",
        ENGINES,
        ("transfer.port_range",),
        "transfer.port_range is malformed or contains a port of ours",
        "the data plane binds ports of the range",
        "use low-high within 1024..65535, apart from the other ports",
        bad_port_range,
    ),
    Rule(
        "SAME_PORT",
        ENGINES,
        ("serve.port", "serve.ops_port"),
        "serve.port = serve.ops_port on one address",
        "two servers cannot share a port",
        "choose another serve.ops_port",
        lambda c: is_same_port((c.serve.host, c.serve.port), (c.serve.ops_host, c.serve.ops_port)),
    ),
    Rule(
        "PREFILL_PATTERNS",
        DECODE,
        ("serve.prefills",),
        "serve.prefills has an entry that is not host:port with a port from 1 to 65535",
        "decode dials only addresses that match the list",
        "write host:port; * matches any host part or any port",
        lambda c: bad_addresses(c.serve.prefills, PATTERN),
    ),
    Rule(
        "TLS_PAIR",
        ENGINES,
        ("serve.tls_cert", "serve.tls_key"),
        "only one of serve.tls_cert and serve.tls_key is set",
        "a certificate is useless without its key",
        "set both or neither",
        lambda c: bool(c.serve.tls_cert) != bool(c.serve.tls_key),
    ),
    Rule(
        "TLS_FILES",
        ENGINES,
        ("serve.tls_cert", "serve.tls_key", "serve.tls_ca"),
        "a TLS file does not exist, or certificate and key do not belong together",
        "the server could not start with TLS",
        "give PEM files without a passphrase, or remove the setting",
        lambda c: unusable_tls(c, "serve"),
    ),
    Rule(
        "TLS_CLIENT_AUTH",
        ENGINES,
        ("serve.tls_client_auth", "serve.tls_cert", "serve.tls_ca"),
        "serve.tls_client_auth without serve.tls_cert and serve.tls_ca",
        "client certificates are checked against tls_ca on a TLS server",
        "set serve.tls_cert, serve.tls_key and serve.tls_ca, or serve.tls_client_auth=false",
        lambda c: c.serve.tls_client_auth and not (c.serve.tls_cert and c.serve.tls_ca),
    ),
)

FIT_RULES: tuple[Rule[Fit], ...] = (
    Rule(
        "HEADS",
        ENGINES,
        ("parallel.tp", "parallel.cp"),
        "tp * cp does not divide the heads, experts, vocabulary or feed-forward widths",
        "every rank of a stage holds an equal share of each of them; nothing is padded",
        "choose tp * cp among the common divisors",
        indivisible,
    ),
    *SPEC_FIT_RULES,
    *STAGE_RULES,
    Rule(
        "MODEL_LEN",
        ENGINES,
        ("model.max_model_len",),
        "model.max_model_len exceeds the model's own limit",
        "the model was not trained for longer contexts",
        "lower model.max_model_len, or 0 for the model's limit",
        lambda f: f.config.model.max_model_len > f.spec.max_position_embeddings,
    ),
    Rule(
        "POOL_BELOW_MODEL_LEN",
        ENGINES,
        ("cache.pages", "cache.page_tokens", "model.max_model_len"),
        "cache.pages hold fewer tokens than model.max_model_len",
        "a request of that length could never be admitted",
        "raise cache.pages, or lower model.max_model_len (0 = what fits)",
        pool_below_longest,
    ),
    Rule(
        "MEMORY",
        ENGINES,
        ("cache.memory_bytes", "cache.state_slots"),
        "no page fits into cache.memory_bytes beside the state slots",
        "a rank needs room for its state slots and at least one page",
        "raise cache.memory_bytes or lower cache.state_slots (schedule.max_rows)",
        no_page_fits,
    ),
)


def refuse(config: EngineConfig, spec: K3Spec | None) -> list[Refusal]:
    """Every violated rule of an engine. `spec` is None when the model cannot be read; a rule says so."""
    found = [rule.judge(config, config) for rule in ENGINE_RULES if config.role in rule.roles]
    pipeline = Pipeline.of(config)
    found += [rule.judge(pipeline, config) for rule in PIPELINE_RULES if config.role in rule.roles]
    if spec is not None:
        fit = Fit(config, spec)
        found += [rule.judge(fit, config) for rule in FIT_RULES if config.role in rule.roles]
    return [refusal for refusal in found if refusal is not None]


def refuse_router(config: RouterConfig) -> list[Refusal]:
    """Every violated rule of the router."""
    found = (rule.judge(config, config) for rule in ROUTER_RULES)
    return [refusal for refusal in found if refusal is not None]


def document() -> str:
    """The table as Markdown: `docs/refusals.md`."""
    return markdown((*IDLE_RULES, *ENGINE_RULES, *PIPELINE_RULES, *FIT_RULES, *ROUTER_RULES))


if __name__ == "__main__":
    sys.stdout.write(document())
