"""GPU kernels in Triton; CPU runs them in the interpreter, for tests only."""
