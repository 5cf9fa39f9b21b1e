"""Rank side of decode."""
