#!/usr/bin/env bash
# Makes .venv in the repository root with `opd` and one extra: bash examples/install.sh [EXTRA]
# Scripts source this file, which does nothing by itself, and call `install_opd [EXTRA]`.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv="$root/.venv"
python="$venv/bin/python"
# Threads that wait without spinning: stages share the cores.
export KMP_BLOCKTIME=0 OMP_WAIT_POLICY=passive

say() { echo "opd: $*" >&2; }

# install_opd [EXTRA]: makes the environment once, and again when what it is made from has changed.
install_opd() {
  local extra=${1:-} stamp="$venv/.installed-${1:-core}"
  [ ! -e "$stamp" ] || [ "$root/pyproject.toml" -nt "$stamp" ] || return 0
  if [ ! -x "$python" ]; then
    say "making $venv"
    "${PYTHON:-python3}" -m venv "$venv"
  fi
  # An unpinned torch brings gigabytes of CUDA to a machine without a GPU.
  if ! "$python" -c 'import torch' 2>/dev/null; then
    if command -v nvidia-smi >/dev/null 2>&1; then
      say "installing PyTorch with CUDA (some gigabytes, minutes)"
      "$python" -m pip install torch
    else
      say "installing PyTorch (about 200 MB)"
      "$python" -m pip install torch==2.13.0
    fi
  fi
  say "installing opd${extra:+[$extra]} and what it needs"
  "$python" -m pip install --editable "$root${extra:+[$extra]}"
  touch "$stamp"
}

# several_runs DEFAULT "$@": for scripts that make more than one run. Sets $out to the value of --out (or DEFAULT),
# $resume to whether --resume was given, and the array $rest to all other arguments.
several_runs() {
  out=$1 resume=false rest=()
  shift
  while [ $# -gt 0 ]; do
    case $1 in
      --out) out=${2:?--out needs a folder} && shift ;;
      --out=*) out=${1#--out=} ;;
      --resume) resume=true ;;
      *) rest+=("$1") ;;
    esac
    shift
  done
}

# run_into FOLDER COMMAND ARGUMENT...: `opd COMMAND` with $rest into FOLDER; with --resume if that was asked for and
# the run has begun.
run_into() {
  local folder=$1
  shift
  if $resume && [ -e "$folder" ]; then set -- "$@" --resume; fi
  "$venv/bin/opd" "$@" ${rest[@]+"${rest[@]}"} --out "$folder"
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then install_opd "$@"; fi
