"""The context service."""
