"""The Kimi-K3 text model. Only `spec` is free of torch."""
