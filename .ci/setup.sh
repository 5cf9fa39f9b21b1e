#!/usr/bin/env bash
# Make the virtual environment, the generated stubs and the native library; nothing to do when all are current.
source "$(dirname "$0")/env.sh"

digest() { cat "$@" | sha256sum | cut -d' ' -f1; }
is_current() { [ -f "$VENV/.$1" ] && [ "$(cat "$VENV/.$1")" = "$2" ]; }

# $PYTHON and no other where it is set.
find_python() {
  local candidate candidates=(python3.11 python3 python3.12 python3.13)
  if [ -n "${PYTHON:-}" ]; then candidates=("$PYTHON"); fi
  for candidate in "${candidates[@]}"; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "no Python >= 3.11 (tried ${candidates[*]}); install python3.11 with its venv module, or set PYTHON" >&2
  return 1
}

packages="$(digest pyproject.toml constraints.txt)"
has_library() { compgen -G 'kernels/k3_kernels/cpu/lib/*.so' > /dev/null; }
stubs="$(digest hatch_build.py proto/k3/v1/*.proto kernels/k3_kernels/cpu/build.py kernels/k3_kernels/cpu/src/*)"

if ! [ -x "$PY" ] || ! is_current packages "$packages"; then
  say "set-up: virtual environment in $VENV (once; minutes)"
  # Without pip it is one that was interrupted, or made by a Python without its venv module.
  if ! "$PY" -m pip --version > /dev/null 2>&1; then
    python="$(find_python)"
    "$python" -m venv "$VENV"
  fi
  # torch first and alone: whichever build (CPU, CUDA) this gives is kept by what follows.
  "$PY" -m pip install --quiet -c constraints.txt torch
  # The build tools live in the environment, so that an editable build needs no second download.
  "$PY" -m pip install --quiet -c constraints.txt hatchling editables grpcio-tools
  "$PY" -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[dev]'
  echo "$packages" > "$VENV/.packages"
  echo "$stubs" > "$VENV/.stubs"
fi
# A build without a compiler said so where nobody saw it: it is asked again, now and whenever this runs.
if ! is_current stubs "$stubs" || ! [ -f k3/v1/plan_pb2.py ] || ! has_library; then
  "$PY" hatch_build.py > /dev/null
  echo "$stubs" > "$VENV/.stubs"
fi
