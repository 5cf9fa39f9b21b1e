"""Kernels and their torch references; knows nothing of services."""
