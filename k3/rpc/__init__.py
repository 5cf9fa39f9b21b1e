"""gRPC edges: server, client, conversion, status."""
