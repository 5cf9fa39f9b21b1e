"""Caches: layout, pages, slots, storage."""
