"""Trains, evaluates and exports the shipped model and its drafters; no service imports it."""
