"""Prefill's scheduler and rank-side execution; embedded by decode with --role both."""
