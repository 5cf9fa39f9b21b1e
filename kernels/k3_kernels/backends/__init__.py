"""Library kernels behind the signatures of `k3_kernels.api`; each file imports its library when constructed."""
