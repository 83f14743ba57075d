#!/usr/bin/env bash
# Makes .venv in the repository root with `opd` and one extra: bash examples/install.sh [EXTRA]
# Scripts source this file, which does nothing by itself, and call `install_opd [EXTRA]`.
set -euo pipefail
unset CDPATH  # with it cd prints where it goes
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv="$root/.venv"
python="$venv/bin/python"
# Threads that wait without spinning: stages share the cores.
export KMP_BLOCKTIME=0 OMP_WAIT_POLICY=passive
# Containers tend to set it: each of a run's many processes would then compile `opd` and its libraries anew.
unset PYTHONDONTWRITEBYTECODE

say() { echo "opd: $*" >&2; }

# install_opd [EXTRA]: makes the environment once, and again when what it is made from has changed; a second installation
# waits for the first. On the platform of the lock (`.ci/requirements/`) exactly what it names, checked by hash; elsewhere
# what the package's own bounds allow.
install_opd() {
  if is_installed "$@"; then return; fi
  if ! [ -w "$root" ]; then
    say "cannot write to $root: install from a checkout of your own"
    return 1
  fi
  if ! command -v "${PYTHON:-python3}" >/dev/null; then
    say "there is no ${PYTHON:-python3}: set PYTHON to a Python 3.11 or newer"
    return 1
  fi
  if ! [ -d "${HOME:-}" ] || ! [ -w "$HOME" ]; then export UV_NO_CACHE=true; fi
  (
    wait_for_others
    is_installed "$@" || install_now "$@"
  ) 8>>"$root/.venv-lock"
}

# Locks file 8, until all that have it open have closed it. By Python: macOS has no `flock`.
wait_for_others() {
  "${PYTHON:-python3}" -c '
import fcntl, sys
try:
    fcntl.flock(8, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("opd: waiting for another installation in this folder", file=sys.stderr)
    fcntl.flock(8, fcntl.LOCK_EX)'
}

is_installed() {
  local stamp="$venv/.installed-${1:-core}" lock="$root/.ci/requirements/${1:-core}.txt"
  [ "$(cat "$stamp" 2>/dev/null)" = "$root" ] && ! [ -e "$venv/.installing" ] && ! [ "$root/pyproject.toml" -nt "$stamp" ] &&
    ! [ "$root/.ci/requirements" -nt "$stamp" ] && ! [ "$lock" -nt "$stamp" ] && "$python" -c '' 2>/dev/null
}

install_now() {
  local extra=${1:-} lock="$root/.ci/requirements/${1:-core}.txt" stamp made_for platform
  for stamp in "$venv"/.installed-*; do
    made_for=$(cat "$stamp" 2>/dev/null || true)
    # The programs of a copied environment begin with the path of the original's Python.
    if [ -n "$made_for" ] && [ "$made_for" != "$root" ]; then
      say "$(basename "$stamp") does not name this folder, so $venv was made for another one or is damaged: beginning anew"
      rm -rf "$venv"
    fi
  done
  if [ -e "$venv/.installing" ]; then
    say "the last installation was interrupted, and packages may lack files: beginning anew"
    rm -rf "$venv"
  fi
  if ! "$python" -m pip --version >/dev/null 2>&1; then
    say "making $venv"
    "${PYTHON:-python3}" -m venv --clear "$venv"
  fi
  touch "$venv/.installing"
  platform=$("$python" -c 'import platform as p, sys; print(sys.platform, p.machine(), *sys.version_info[:2])')
  if [ -z "$platform" ]; then
    say "$python is no Python: remove $venv and try again"
    return 1
  fi
  if ! "$python" -c 'import torch' 2>/dev/null; then
    # By pip, which finds a machine's own build of it; uv is told to leave it alone.
    say "installing PyTorch"
    "$python" -m pip install -r "$root/.ci/requirements/torch.txt"
  fi
  say "installing opd${extra:+[$extra]} and what it needs"
  if [ "$platform" = "linux x86_64 3 11" ]; then
    "$python" -m pip install --quiet --require-hashes -r "$root/.ci/requirements/tools.txt"
    "$python" -m uv pip install --python "$python" --require-hashes --no-deps -r "$lock"
    "$python" -m uv pip install --python "$python" --no-deps --no-build-isolation --editable "$root"
  else
    say "no versions are locked for $platform: taking what pyproject.toml allows"
    "$python" -m pip install --quiet uv
    "$python" -m uv pip install --python "$python" --editable "$root${extra:+[$extra]}"
  fi
  stamp="$venv/.installed-${1:-core}"
  rm -rf "$stamp"
  echo "$root" >"$stamp"  # a copy of it elsewhere would import this one's code
  rm "$venv/.installing"
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

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
  extras=$(sed -n '/^\[project.optional-dependencies\]/,/^$/s/^\([a-z0-9-]*\) = .*/\1/p' "$root/pyproject.toml" | xargs)
  if [ $# -gt 1 ] || ! [[ -z ${1:-} || ($1 != *[[:space:]]* && " $extras " = *" $1 "*) ]]; then
    say "usage: bash examples/install.sh [EXTRA], where EXTRA is one of: $extras"
    case ${1:-} in -h | --help) exit 0 ;; *) exit 2 ;; esac
  fi
  install_opd "$@"
fi
