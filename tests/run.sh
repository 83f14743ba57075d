#!/usr/bin/env bash
# Installs what the tests need and runs them, a file more at a time than there are cores, since some wait; at most five:
#   bash tests/run.sh                  # by default: what ends in minutes
#   bash tests/run.sh train --full     # all tests of one folder; --full alone: all of all
#   bash tests/run.sh --check          # types, site, wheel, shell scripts
# Other arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source examples/install.sh
extra=test arguments=()
for argument in "$@"; do
  case $argument in
    --full) extra=test-full ;;
    --check) extra=test-full argument="-m=check" ;;
  esac
  if [[ $argument =~ ^[a-z_]+$ && -d tests/$argument ]]; then argument=tests/$argument; fi
  arguments+=("$argument")
done
install_opd "$extra"
"$python" -m ruff check .
"$python" -m ruff format --check .
cores=$("$python" -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')
exec "$python" -m pytest -n $((cores < 4 ? cores + 1 : 5)) --dist loadfile --no-loadscope-reorder ${arguments[@]+"${arguments[@]}"}
