"""The OpenAI-compatible front door."""
