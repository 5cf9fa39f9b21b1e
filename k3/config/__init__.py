"""Configuration: one frozen tree, its sources, its refusals."""
