#!/usr/bin/env bash
# Installs what the tests need and runs them, a file more at a time than there are cores, since some wait; at most five:
#   bash tests/run.sh                  # by default: what ends in minutes
#   bash tests/run.sh train --full     # all tests of one folder; --full alone: all of all
#   bash tests/run.sh --check          # types, site, wheel, shell scripts
# Other arguments go to pytest.
set -euo pipefail
unset CDPATH  # with it cd prints where it goes
cd "$(dirname "$0")/.."
source examples/install.sh
extra=test arguments=() option=
for argument in "$@"; do
  case $argument in
    --full | --cov*) extra=test-full ;;
    --check) extra=test-full argument="-m=check" ;;
  esac
  case $option in
    -[kmpnocWr] | --deselect | --ignore | --durations | --timeout | --maxfail | --tb | --dist | --basetemp | --junitxml) ;; # its value
    *)
      if [[ $argument =~ ^[a-z_]+/?$ && -d tests/$argument ]]; then
        argument=tests/${argument%/}
      elif [[ $argument != -* && ! -e ${argument%%::*} ]]; then
        say "there is no tests/$argument and no $argument: name a folder of tests/, or a file by its path from $root"
        exit 2
      fi
      ;;
  esac
  option=$argument
  arguments+=("$argument")
done
install_opd "$extra"
"$python" -m ruff check .
"$python" -m ruff format --check .
cores=$("$python" -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')
exec "$python" -m pytest -n $((cores < 4 ? cores + 1 : 5)) --dist loadfile --no-loadscope-reorder ${arguments[@]+"${arguments[@]}"}
