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

# Where it can be built it must be, or every test of it would be skipped.
native() {
  ! command -v "${CXX:-c++}" > /dev/null ||
    "$PY" -c 'from k3_kernels.cpu import library as it; it.variant() is None or it.function("k3_rms_norm_f32")'
}

check "native library" native
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
