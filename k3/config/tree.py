"""The configuration of one process: a frozen tree, the same names in YAML, environment and flags.

`section.key` is `--section-key` on the command line and `K3_SECTION__KEY` in the environment. The help text of a flag
is the metadata of its field. Durations are seconds (`30s`, `5m` accepted), sizes bytes (`16MiB` accepted).
`k3/config/load.py` builds the tree, `k3/config/refusals.py` judges it. Nothing else reads the environment.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from k3.config.keys import key
from k3.config.router_sections import AdmissionConfig, FleetConfig, HttpConfig


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which checkpoint, in which precision."""

    path: str = key("", "folder with config.json and safetensors; empty = the embedded k3-mini")
    name: str = key("", "name of the model in the API; empty = the folder's name")
    dtype: str = key(
        "auto",
        "compute and cache precision; auto = float32 on CPU, bfloat16 on GPU",
        choices=("auto", "float64", "float32", "bfloat16"),
    )
    device: str = key(
        "auto", "auto = cuda when there is one, else cpu", choices=("auto", "cpu", "cuda")
    )
    max_model_len: int = key(
        0, "longest prompt + output; 0 = the model's own limit", unit="tokens", least=0
    )


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """How the model is spread over ranks."""

    pp: int = key(1, "pipeline stages", least=1)
    partition: str = key("", "layers of each stage, as in 5,4; empty = balanced")
    pp_remote_kv: bool = key(
        False, "decode over pipeline stages: every stage takes caches from prefill"
    )
    tp: int = key(1, "tensor parallel size", least=1)
    cp: int = key(1, "helix context parallel size (decode only)", least=1)
    exchange: str = key(
        "auto",
        "what cp ranks send per MLA layer: value (fewer bytes), latent (fewer weights read), or gather (values to "
        "all, output weights on every rank: one message less); auto = gather on CPU, else value",
        choices=("auto", "value", "latent", "gather"),
    )


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Sizes of the pools."""

    page_tokens: int = key(
        16, "tokens of one page, a power of two 4..128", unit="tokens", least=4, most=128
    )
    pages: int = key(0, "pages of each rank's pool; 0 = from memory_bytes", least=0)
    memory_bytes: int = key(512 << 20, "bytes for all pools of one rank", unit="bytes", least=1)
    state_slots: int = key(
        0,
        "state slots; 0 = checkpoints + max_rows + max_queue on prefill, + max_rows + 1 on decode",
        least=0,
    )
    fill_nan: bool = key(False, "fill fresh pools with NaN, so that a read of unowned memory shows")
    prefix: str = key("off", "hybrid prefix cache of computed prompts", choices=("off", "on"))
    checkpoints: int = key(
        0, "state slots for checkpoints beside those of requests; 0 = 2 * max_rows + pp", least=0
    )
    checkpoint_interval: int = key(
        8192,
        "a prompt's recurrent state is kept every so many tokens, in whole pages",
        unit="tokens",
        least=1,
    )
    checkpoint_anchor: bool = key(
        True, "keep the state at the last page boundary of every prompt too, for the next turn"
    )
    checkpoint_rungs: str = key(
        "latest",
        "of several places in one chunk keep the state at the last one, or at each",
        choices=("latest", "earliest"),
    )
    checkpoint_mode: str = key(
        "fork_at_schedule",
        "how states are kept: the next chunk writes elsewhere (fork_at_schedule), the same after waiting (fork_hold), "
        "or a copy is made (copy)",
        choices=("fork_at_schedule", "fork_hold", "copy"),
    )


@dataclass(frozen=True, slots=True)
class ScheduleConfig:
    """Batching and queues."""

    max_rows: int = key(16, "requests running at once", least=1)
    max_queue: int = key(
        64, "requests that may wait in this service; more are refused at once", least=0
    )
    token_budget: int = key(512, "prompt tokens of one prefill step", unit="tokens", least=1)
    local_prefill_max: int = key(
        0, "prompts up to this length are computed by decode itself", unit="tokens", least=0
    )
    chunk_costs: str = key(
        "",
        "prefill: relative costs of a step, a cached token, a token and a pair of tokens, as in 40,0,2,0.001; "
        "chunks then shrink as the prefix grows, so that steps take equally long; empty = off",
    )
    depth: int = key(2, "decode steps in flight: 1 = synchronous, 2 = overlapped", least=1, most=2)
    plan_timeout_s: float = key(
        60.0, "a plan unanswered for this long fails the rank group", unit="s", least=0.1
    )
    max_early_prefills: int = key(
        2, "requests at the head of decode's queue whose prompt may be computed early", least=0
    )
    reserve_wait_s: float = key(
        30.0, "prefill keeps pages without a destination", unit="s", least=0
    )


@dataclass(frozen=True, slots=True)
class SpecConfig:
    """Speculation: decode proposes and verifies, prefill hands the drafter's context over."""

    draft_tokens: int = key(
        0, "drafts per verify group (decode); 0 = no speculation", least=0, most=15
    )
    drafter: str = key("", "drafter folder, also relative to model.path; give it to both services")
    draft_window: int = key(
        0,
        "tokens before the anchor a drafter reads (decode); 0 = the longest request",
        unit="tokens",
        least=0,
    )
    acceptance: str = key(
        "match",
        "which drafts decode keeps: those that equal what is drawn anyway (match: text does not depend on drafts), or "
        "by weighing what the target and the drafter give them (token, block: more are kept, only the law is the same)",
        choices=("match", "token", "block"),
    )
    kda_rollback: str = key(
        "auto",
        "what decode keeps to take KDA states back to an accepted draft: a state per group token (snapshots) or "
        "records of the tokens (replay); auto = replay on GPU, else snapshots",
        choices=("auto", "snapshots", "replay"),
    )
    draft_schedule: str = key(
        "fixed",
        "how many drafts decode checks per step: all (fixed; observe: and the drafter's confidences are kept for "
        "k3-bench calibrate), or as many as confidence and the cost of steps make worth while (confidence)",
        choices=("fixed", "observe", "confidence"),
    )
    calibration: str = key(
        "", "file of measured step rates and confidence temperatures, made by k3-bench calibrate"
    )
    gate_window: int = key(
        0, "ended requests over which accepted drafts are averaged; 0 = always speculate", least=0
    )
    gate_threshold: float = key(
        0.5, "accepted drafts per step below which decode stops speculating", least=0.0, most=15.0
    )
    gate_retry_steps: int = key(
        2000, "steps after which a closed gate is tried again; doubles with each failure", least=1
    )


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """Clocks and limits of the transfer; `nixl` names of the environment stay UCX's own."""

    heartbeat_s: float = key(
        2.0, "Progress on every stream with a destination", unit="s", least=0.01
    )
    lease_s: float = key(
        30.0, "decode gives a transfer up without a heartbeat", unit="s", least=0.01
    )
    progress_timeout_s: float = key(
        10.0, "decode aborts a transfer whose bytes do not grow", unit="s", least=0.01
    )
    transfer_deadline_s: float = key(
        30.0, "from the first token to the last byte", unit="s", least=0.01
    )
    self_fence_s: float = key(
        15.0, "prefill stops posting without a heartbeat echo", unit="s", least=0.01
    )
    handle_deadline_s: float = key(
        10.0, "one posted handle, at least; grows with its bytes", unit="s", least=0.01
    )
    drain_s: float = key(
        10.0, "posted handles may take this long to end after an abort", unit="s", least=0.01
    )
    resend_after_s: float = key(
        5.0, "decode asks again for records missing after Committed", unit="s", least=0.01
    )
    quarantine_cap: float = key(
        0.1,
        "share of pages in quarantine above which decode rebuilds its agents",
        least=0.0,
        most=1.0,
    )
    handles_in_flight: int = key(4, "posted handles per pair of ranks", least=1)
    bytes_in_flight: int = key(256 << 20, "posted bytes per sending rank", unit="bytes", least=1)
    port_range: str = key("", "UCX_TCP_PORT_RANGE for the data plane, for example 41000-41050")
    min_bandwidth: float = key(
        0.0,
        "GB/s that each rank must write to another process of its host at start, else it is not ready; 0 = not tested",
        least=0.0,
    )


@dataclass(frozen=True, slots=True)
class BackendsConfig:
    """Which kernels."""

    attention: str = key(
        "auto",
        "attention kernels; auto = native on CPU (reference where it is not built), the fastest installed one on a GPU",
        choices=("auto", "native", "reference", "triton", "flashmla", "flashinfer"),
    )
    kda: str = key(
        "auto",
        "kernels of KDA and of mixing residuals; auto = native on CPU, triton on a GPU",
        choices=("auto", "native", "reference", "triton"),
    )
    moe: str = key(
        "auto",
        "kernels of router and experts; auto = native on CPU, triton on a GPU",
        choices=("auto", "native", "reference", "triton"),
    )
    moe_weights: str = key(
        "auto",
        "MXFP4 experts: dequantized at load or per use; auto = packed with triton kernels, dequant otherwise",
        choices=("auto", "dequant", "packed"),
    )
    graphs: str = key(
        "auto",
        "decode: record steps as CUDA graphs and replay them (on), or run them as they come (off); auto = on where "
        "a GPU runs all layers",
        choices=("auto", "on", "off"),
    )
    max_graphs: int = key(
        256, "decode: recorded steps kept at a time, the one unused for longest goes first", least=1
    )
    collectives: str = key(
        "auto",
        "messages between the ranks of a stage: shared memory (CPUs only) or torch's gloo and NCCL; auto = shared on "
        "a CPU where the native library is built, torch elsewhere",
        choices=("auto", "shared", "torch"),
    )
    threads: int = key(0, "CPU threads of each rank; 0 = cores / ranks", least=0)


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Ports, names, lifecycle."""

    host: str = key("127.0.0.1", "address the gRPC server binds")
    port: int = key(0, "gRPC port; 0 = 50051 prefill, 50052 decode", least=0, most=65535)
    ops_host: str = key("127.0.0.1", "address of /health /ready /startup /metrics")
    ops_port: int = key(9090, "ops port", least=0, most=65535)
    prefills: tuple[str, ...] = key(
        ("127.0.0.1:*", "localhost:*"),
        "prefill addresses decode may dial, host:port, * matches any",
    )
    drain_delay_s: float = key(
        5.0, "after SIGTERM new requests are still served for this long", unit="s", least=0
    )
    drain_timeout_s: float = key(
        600.0, "running requests may take this long to finish", unit="s", least=0
    )
    stall_timeout_s: float = key(
        30.0, "/health fails when there is work but no step for this long", unit="s", least=0.1
    )
    on_rank_loss: str = key("restart", "what to do when a rank dies", choices=("restart", "exit"))
    reflection: bool = key(True, "gRPC reflection")
    tls_cert: str = key("", "PEM certificate of the gRPC server; empty = no TLS")
    tls_key: str = key("", "PEM key of the gRPC server")
    tls_ca: str = key("", "PEM authorities trusted for peers")
    tls_client_auth: bool = key(False, "demand client certificates (mTLS)")


@dataclass(frozen=True, slots=True)
class TelemetryConfig:
    """Logs and metrics."""

    log_format: str = key("json", "log lines", choices=("json", "text"))
    log_level: str = key(
        "info", "least severe level", choices=("debug", "info", "warning", "error")
    )
    metrics_compat: str = key(
        "vllm", "also serve metrics under these names", choices=("vllm", "off")
    )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Configuration of `k3-prefill` and `k3-decode`."""

    role: str = key(
        "",
        "empty = that of the command; both: decode computes prompts itself",
        choices=("", "prefill", "decode", "both"),
    )
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    spec: SpecConfig = field(default_factory=SpecConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    backends: BackendsConfig = field(default_factory=BackendsConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Configuration of `k3-router`."""

    model: ModelConfig = field(default_factory=ModelConfig)
    http: HttpConfig = field(default_factory=HttpConfig)
    fleet: FleetConfig = field(default_factory=FleetConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
