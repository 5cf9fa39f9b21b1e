# Sourced by every script here: strict mode, repository root, one virtual environment.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV="${K3_VENV:-$PWD/.venv}"
PY="$VENV/bin/python"
export PATH="$VENV/bin:$PATH" PIP_DISABLE_PIP_VERSION_CHECK=1
# Ranks and tests are many processes on few cores: one thread each unless the caller says otherwise.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

say() { printf '\n== %s\n' "$*"; }
