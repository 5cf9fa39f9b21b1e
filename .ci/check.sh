#!/usr/bin/env bash
# Static checks: format, lint, types, import contracts, wire. All run; the exit status counts them all.
source "$(dirname "$0")/env.sh"

failed=()
check() {
  local name="$1"
  shift
  say "$name"
  "$@" || failed+=("$name")
}

check "format" ruff format --check .
check "lint" ruff check .
check "types" pyright
check "import contracts" lint-imports
check "wire" buf lint
if [ "${#failed[@]}" -gt 0 ]; then
  printf '\ncheck failed: %s\n' "$(IFS=,; echo "${failed[*]}")" >&2
  exit 1
fi
printf '\ncheck passed\n'
