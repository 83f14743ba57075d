#!/usr/bin/env bash
# Installs what the tests need and runs them, two files more at a time than there are cores, since some wait; at most
# five, and one for 2 GiB of memory:
#   bash tests/run.sh                      # by default: what ends in minutes
#   bash tests/run.sh train --full         # all tests of one folder; --full alone: all of all
#   bash tests/run.sh data/test_files.py -x # a file, or file.py::test, which runs whatever its marker
#   bash tests/run.sh --check              # types, site, wheel, shell scripts
# Other arguments go to pytest.
set -euo pipefail
unset CDPATH  # with it cd prints where it goes
cd "$(dirname "$0")/.."
source examples/install.sh
extra=test arguments=() before=
for argument in "$@"; do
  case $argument in
    '')
      say "an argument is empty: leave it out"
      exit 2
      ;;
    -h | --help)
      sed -n '/^# /s/^# //p' tests/run.sh
      exit
      ;;
    --full) extra=test-full ;;
    --cov) extra=test-full argument="--cov=" ;;  # what follows is a folder of tests
    --cov*) extra=test-full ;;
    --check) extra=test-full argument="-m=check" ;;
  esac
  case $before in
    -[kmpnocWr] | --deselect | --ignore | --ignore-glob | --durations* | --timeout* | --max* | --tb | --dist | --tx) ;;
    --basetemp | --junit* | --cov-* | --rootdir | --confcutdir | --color | --log-* | --capture | --show-capture) ;;
    --import-mode | --verbosity | --hypothesis-* | --override-ini | --pythonwarnings | --pdbcls | --assert) ;;
    *)
      path=${argument%%::*}
      if [[ $argument != -* && $argument != tests/* && -e tests/$path ]]; then
        argument=tests/${argument%/}
      elif [[ $argument != -* && ! -e $path && $before =~ ^([^-].*|.*=.*|--full|--record|-[xvqsl]*)?$ ]]; then
        say "there is no $path in $root, nor in its tests/: name a folder of tests/, or a file"
        exit 2
      fi
      ;;
  esac
  before=$argument
  arguments+=("$argument")
done
install_opd "$extra"
if ! [ -w . ]; then export RUFF_NO_CACHE=true; fi
"$python" -m ruff check .
"$python" -m ruff format --check .
cores=$("$python" -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')
memory=$("$python" -c 'import os; print(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30)')
workers=$((cores < 3 ? cores + 2 : 5))
workers=$((memory / 2 < workers ? memory / 2 : workers))
exec "$python" -m pytest -n $((workers < 1 ? 1 : workers)) --dist loadfile --no-loadscope-reorder ${arguments[@]+"${arguments[@]}"}
