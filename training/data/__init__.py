"""Training documents and evaluation items, made by code from seeds; the texts beside the modules are its grammar."""
