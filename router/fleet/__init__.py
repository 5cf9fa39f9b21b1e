"""Instances, pairing, attempts."""
