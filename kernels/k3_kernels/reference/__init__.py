"""Plain torch references with the kernels' signatures."""
