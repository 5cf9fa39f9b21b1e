"""Logs, metrics, traces."""
