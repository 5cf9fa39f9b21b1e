#!/usr/bin/env bash
# Make the virtual environment, the generated stubs and the native library; nothing to do when all are current.
source "$(dirname "$0")/env.sh"

digest() { cat "$@" | sha256sum | cut -d' ' -f1; }
is_current() { [ -f "$VENV/.$1" ] && [ "$(cat "$VENV/.$1")" = "$2" ]; }

find_python() {
  for candidate in "${PYTHON:-python3.11}" python3 python3.12 python3.13; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "no Python >= 3.11 found; install python3.11 with its venv module, or set PYTHON" >&2
  exit 1
}

packages="$(digest pyproject.toml constraints.txt)"
has_library() { compgen -G 'kernels/k3_kernels/cpu/lib/*.so' > /dev/null; }
stubs="$(digest hatch_build.py proto/k3/v1/*.proto kernels/k3_kernels/cpu/build.py kernels/k3_kernels/cpu/src/*)"

if ! [ -x "$PY" ] || ! is_current packages "$packages"; then
  say "set-up: virtual environment in $VENV (once; minutes)"
  [ -x "$PY" ] || "$(find_python)" -m venv "$VENV"
  # torch first and alone: whichever build (CPU, CUDA) this gives is kept by what follows.
  "$PY" -m pip install --quiet -c constraints.txt torch
  # The build tools live in the environment, so that an editable build needs no second download.
  "$PY" -m pip install --quiet -c constraints.txt hatchling editables grpcio-tools
  "$PY" -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[dev]'
  echo "$packages" > "$VENV/.packages"
  echo "$stubs" > "$VENV/.stubs"
elif ! is_current stubs "$stubs" || ! [ -f k3/v1/plan_pb2.py ] || ! has_library; then
  "$PY" hatch_build.py > /dev/null
  echo "$stubs" > "$VENV/.stubs"
fi
