"""Rank processes: channel, supervision, mover, entry point."""
