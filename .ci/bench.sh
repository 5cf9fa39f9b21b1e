#!/usr/bin/env bash
# Load and step benchmarks on a cluster of their own; dated results in benchmarks/results/.
source "$(dirname "$0")/env.sh"
.ci/setup.sh
unset OMP_NUM_THREADS
out="benchmarks/results/$(date +%F)"
mkdir -p "$out"
k3-bench serve --local --requests 64 --concurrency 8 --json "$out/serve.json" --plot "$out/serve.png"
k3-bench step --json "$out/step.json"
