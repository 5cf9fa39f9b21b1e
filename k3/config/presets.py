"""Named overlays between the defaults and the YAML file: `--preset tiny-test`, `--preset tiny-demo`.

A preset is what its YAML file would say, by dotted path. Keys that a process does not have are left out for it, so one
name serves prefill, decode and router.
"""

from __future__ import annotations

from collections.abc import Mapping

PRESETS: Mapping[str, Mapping[str, object]] = {
    # Exact arithmetic, pools small enough to overflow in a test, unread memory shows as NaN.
    "tiny-test": {
        "model.device": "cpu",
        "model.dtype": "float64",
        "cache.page_tokens": 8,
        "cache.checkpoint_interval": 64,
        "cache.memory_bytes": "64MiB",
        "cache.fill_nan": True,
        "schedule.max_rows": 4,
        "schedule.max_queue": 8,
        "schedule.token_budget": 64,
        "schedule.plan_timeout_s": "20s",
        "backends.threads": 1,
        "serve.drain_delay_s": 0,
        "serve.drain_timeout_s": "20s",
        "http.drain_delay_s": 0,
        "http.drain_timeout_s": "20s",
        "telemetry.log_format": "text",
    },
    # The embedded model for one laptop: a handful of conversations at once.
    "tiny-demo": {
        "model.device": "cpu",
        "model.dtype": "float32",
        "cache.page_tokens": 16,
        "cache.checkpoint_interval": 512,
        "cache.memory_bytes": "256MiB",
        "schedule.max_rows": 8,
        "schedule.max_queue": 32,
        "schedule.token_budget": 512,
        "backends.threads": 1,  # ranks and engines share the cores, and waiting threads would spin on them
        "serve.drain_delay_s": 0,
        "serve.drain_timeout_s": "30s",
        "http.drain_delay_s": 0,
        "http.drain_timeout_s": "30s",
        "telemetry.log_format": "text",
    },
}
