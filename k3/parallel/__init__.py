"""Ranks, groups and collectives."""
