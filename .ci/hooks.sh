#!/usr/bin/env bash
# Install the git hooks of .pre-commit-config.yaml (all local: nothing is downloaded).
source "$(dirname "$0")/env.sh"
if git rev-parse --git-dir > /dev/null 2>&1; then pre-commit install > /dev/null; fi
