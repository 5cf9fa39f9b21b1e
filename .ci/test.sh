#!/usr/bin/env bash
# Tests. `test.sh fast` = check + unit, golden, property, sim. `test.sh` = fast + every other folder
# that needs no GPU. Further arguments go to pytest.
source "$(dirname "$0")/env.sh"
.ci/setup.sh

what="${1:-all}"
[ "$#" -gt 0 ] && shift
status=0

# folders LABEL WORKERS FOLDER...: one pytest run over those of the folders that exist.
folders() {
  local label="$1" workers="$2" present=() folder
  shift 2
  for folder in "$@"; do
    if [ -d "tests/$folder" ]; then present+=("tests/$folder"); fi
  done
  if [ "${#present[@]}" -eq 0 ]; then return; fi
  say "$label: ${present[*]}"
  "$PY" -m pytest -q -n "$workers" --dist loadfile "${present[@]}" "${extra[@]}" || status=1
}

extra=("$@")
.ci/check.sh || status=1
folders "pure" 2 unit golden property sim
if [ "$what" = all ]; then
  .ci/chart.sh || status=1
  # Two files at a time: each has many processes of its own.
  folders "processes" 2 e2e lifecycle security chaos model_quality
fi
exit "$status"
