#!/usr/bin/env bash
# Tests with real processes: `e2e.sh FOLDER [pytest arguments]`.
source "$(dirname "$0")/env.sh"
.ci/setup.sh
folder="$1"
shift
"$PY" -m pytest -q "tests/$folder" "$@"
