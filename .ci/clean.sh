#!/usr/bin/env bash
# Remove caches and generated files; keep the virtual environment.
source "$(dirname "$0")/env.sh"
rm -rf k3/v1 kernels/k3_kernels/cpu/lib build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache .chart
find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
