"""k3-serving's shared library: model, caches, parallelism, transfer, rpc, configuration."""
