#!/usr/bin/env bash
# Makes .venv in the repository root with `opd` and the extras named by the arguments, once. Sourced by the
# scripts that need it: afterwards $python is the environment's interpreter.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv="$root/.venv"
python="$venv/bin/python"
extras=${1:+[$1]}
stamp="$venv/.installed-${1:-core}"
if [ ! -e "$stamp" ] || [ "$root/pyproject.toml" -nt "$stamp" ]; then
  [ -x "$python" ] || "${PYTHON:-python3}" -m venv "$venv"
  # An unpinned torch brings gigabytes of CUDA to a machine without a GPU.
  if ! "$python" -c 'import torch' 2>/dev/null; then
    if command -v nvidia-smi >/dev/null 2>&1; then
      "$python" -m pip install --quiet torch
    else
      "$python" -m pip install --quiet torch==2.13.0
    fi
  fi
  "$python" -m pip install --quiet --editable "$root$extras"
  touch "$stamp"
fi
# Threads that wait without spinning: stages share the cores.
export KMP_BLOCKTIME=0 OMP_WAIT_POLICY=passive
