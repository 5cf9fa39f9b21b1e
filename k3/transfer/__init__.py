"""Moving caches from prefill to decode."""
