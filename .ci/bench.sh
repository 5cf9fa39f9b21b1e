#!/usr/bin/env bash
# Load and step benchmarks on clusters of their own: tables, figures and a plot in benchmarks/results/DATE/.
source "$(dirname "$0")/env.sh"
.ci/setup.sh
unset OMP_NUM_THREADS
export COLUMNS=100
out="benchmarks/results/$(date +%F)"
mkdir -p "$out"
{
  echo "commit $(git rev-parse --short HEAD 2> /dev/null || echo unknown), $(nproc) cores, load $(cut -d' ' -f1 /proc/loadavg)"
  k3-bench step --json "$out/step.json"
} | tee "$out/step.txt"
k3-bench serve --local --requests 64 --concurrency 8 --json "$out/serve.json" --plot "$out/serve.png" | tee "$out/serve.txt"
