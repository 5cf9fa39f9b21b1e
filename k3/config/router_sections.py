"""What only a router is told: its ports, its fleet, its admission. Sections of `k3.config.tree.RouterConfig`."""

from __future__ import annotations

from dataclasses import dataclass

from k3.config.keys import key


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """The router's public and admin ports and limits."""

    host: str = key("127.0.0.1", "address of the public API")
    port: int = key(8000, "port of the public API; 0 = any free one", least=0, most=65535)
    admin_host: str = key("127.0.0.1", "address of the admin API")
    admin_port: int = key(8081, "port of the admin API; 0 = any free one", least=0, most=65535)
    max_body_bytes: int = key(
        16 << 20,
        "largest request body; of bodies that are still arriving the router holds eight times as much, and "
        "answers 429 beyond",
        unit="bytes",
        least=1,
    )
    request_timeout_s: float = key(
        600.0, "deadline of a request; clients may lower it", unit="s", least=0.001
    )
    sse_heartbeat_s: float = key(
        15.0, "comment lines while a stream waits for its first token", unit="s", least=0.1
    )
    api_key_file: str = key(
        "", "accepted API keys, one a line; empty = no key is asked for, all callers share a cache"
    )
    admin_key_file: str = key("", "accepted keys of the admin API, one a line; empty = none asked")
    metrics_auth: bool = key(False, "ask for an API key on /metrics too")
    cors_origins: tuple[str, ...] = key((), "allowed CORS origins; empty = none")
    default_max_tokens: int = key(
        0, "cap on the default output length; 0 = rest of context", unit="tokens", least=0
    )
    strict_params: bool = key(False, "refuse unknown fields instead of ignoring them")
    per_request_spec_stats: str = key(
        "off",
        "summary: every answer of one choice says how its drafts fared, detailed: also step by step; "
        "off: the summary where return_spec_stats asks for it",
        choices=("off", "summary", "detailed"),
    )
    drain_delay_s: float = key(
        5.0, "after SIGTERM new requests are still served for this long", unit="s", least=0
    )
    drain_timeout_s: float = key(
        600.0, "running requests may take this long to finish", unit="s", least=0
    )


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """The instances and how requests are paired with them."""

    prefills: tuple[str, ...] = key((), "prefill instances, host:port")
    decodes: tuple[str, ...] = key((), "decode instances, host:port")
    policy: str = key(
        "least_load",
        "choice of decode; session: by X-Session-Affinity, prefix: by the first tokens; cache_aware: as for prefill",
        choices=("least_load", "round_robin", "random", "session", "prefix", "cache_aware"),
    )
    prefill_policy: str = key(
        "cache_aware",
        "choice of prefill; cache_aware: fewest tokens not cached there or waiting before it",
        choices=(
            "cache_aware",
            "least_load",
            "round_robin",
            "random",
            "power_of_two",
            "session",
            "prefix",
        ),
    )
    max_retries: int = key(2, "further prefill candidates of one attempt", least=0)
    connect_timeout_s: float = key(2.0, "deadline of a dial", unit="s", least=0.01)
    tls_ca: str = key("", "PEM authorities trusted for instances; empty = no TLS")
    tls_cert: str = key("", "PEM client certificate")
    tls_key: str = key("", "PEM client key")


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """How many requests the router lets in."""

    max_in_flight: int = key(512, "requests being served", least=1)
    max_queue: int = key(256, "requests waiting for an instance with room", least=0)
    queue_timeout_s: float = key(30.0, "longest wait in the router's queue", unit="s", least=0)
